"""The folder of a run: creates it, and refuses a folder with the results of another run."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem.launch.assembly.identity import about
from tandem.launch.assembly.versions import versions
from tandem.launch.compose.settings_file import as_yaml
from tandem.launch.storage.checkpoint import Checkpoint
from tandem.launch.storage.checkpoints import Checkpoints
from tandem.launch.storage.manifest import RunIdentity
from tandem.launch.storage.sharing import follow_umask
from tandem.launch.storage.stores import CHECKPOINTS
from tandem.platform.config.schema import Config, ConfigError
from tandem.platform.system.files import FileError, write_json, write_text
from tandem.platform.system.readers import read_object
from tandem.platform.system.redact import redacted_values

ATTEMPTS = "attempts"
"""Subfolder for the records of attempts that ended without a checkpoint."""


def name_run(config: Config, started_at: float) -> None:
    """Sets run.name if it is missing."""
    if config.run.name is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started_at))
        config.run.name = f"{config.algo.name}-seed{config.run.seed}-{stamp}-{os.getpid()}"


def folder_of(config: Config) -> Path:
    """The folder of the run's records."""
    return Path(config.run.dir) / str(config.run.name)


def make_folder(
    config: Config,
    started_at: float,
    checkpoints: Checkpoints,
    found: Checkpoint | None,
    note: Callable[[str], None] = lambda text: None,
) -> Path:
    """Creates the run's folder with `config.yaml`, `versions.json` and `run.json`.

    Moves the records of an attempt that ended before its first checkpoint into `attempts/`.

    Raises:
        ConfigError: the folder or `checkpoint.dir` holds another run; or it holds this run, but the settings do not resume
            from its newest checkpoint.
    """
    folder = folder_of(config)
    checkpoints.run = _identity(folder, checkpoints, found)
    resume = f"checkpoint.resume={config.checkpoint.resume}"
    if not _goes_on(checkpoints, found, folder):
        if checkpoints.has_any():
            raise ConfigError(
                f"{checkpoints.root} holds a run already, and with {resume} this run does not resume from its newest "
                "checkpoint. Set another run.name to start over or to branch off"
            )
        _refuse_results(folder)
        _set_aside(folder, note)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        follow_umask(folder)  # the folder may exist with other permissions
        (folder / "summary.json").unlink(missing_ok=True)
        write_text(folder / "config.yaml", settings_yaml(config))
        write_json(folder / "versions.json", versions())
        write_json(folder / "run.json", _facts(config, started_at, checkpoints.run.id, _object(folder / "run.json")))
    except OSError as error:
        raise ConfigError(f"run.dir={config.run.dir}: the run's folder cannot be written: {error}") from error
    checkpoints.check_writable()
    return folder


def _facts(config: Config, started_at: float, run_id: str, before: Mapping[str, Any]) -> dict[str, Any]:
    """The new content of `run.json`. `before`: its old content, which keeps the start time of a resumed run."""
    facts = {**about(config, started_at), "id": run_id}
    if before.get("id") != run_id or not isinstance(before.get("started_at"), str):
        return facts
    return {**facts, "started_at": before["started_at"], "continued_at": facts["started_at"]}


def _goes_on(checkpoints: Checkpoints, found: Checkpoint | None, folder: Path) -> bool:
    """Whether the run resumes from its own newest checkpoint, in the current or a previous checkpoint folder."""
    if checkpoints.is_newest(found):
        return True
    if found is None or checkpoints.has_any():
        return False
    is_own = found.manifest.run is not None and found.manifest.run.id == _known_id(folder)
    return is_own and Checkpoints(os.path.dirname(found.path), keep=1).is_newest(found)


def _identity(folder: Path, checkpoints: Checkpoints, found: Checkpoint | None) -> RunIdentity:
    """The identity of the run, which distinguishes it from others with the same name.

    Raises:
        ConfigError: another run wrote the checkpoint found in this run's checkpoint folder.
    """
    known, here = _known_id(folder), str(folder.absolute())
    writer = found.manifest.run if found else None
    if found is None or writer is None or not checkpoints.holds(found):
        return RunIdentity(known or uuid.uuid4().hex, here)
    if writer.id != known if known else writer.folder != here:
        raise ConfigError(
            f"{checkpoints.root} holds the checkpoints of another run of this name, with its records in {writer.folder}. "
            "Set another run.name; to branch off from them, set checkpoint.resume to the path of one of them too"
        )
    return RunIdentity(writer.id, here)


def _known_id(folder: Path) -> str | None:
    """The id of the run that has its records in a folder; None if unknown."""
    run_id = _object(folder / "run.json").get("id")
    return run_id if isinstance(run_id, str) else None


def _refuse_results(folder: Path) -> None:
    """Refuses a folder with a finished run, or with a run that has other checkpoints.

    Raises:
        ConfigError: the folder holds such a run.
    """
    if _object(folder / "summary.json").get("status") == "finished":
        raise ConfigError(f"{folder} holds a finished run. Set another run.name, or move the folder away")
    previous = Checkpoints(str(folder / CHECKPOINTS), keep=1)
    if newest := previous.newest():
        raise ConfigError(
            f"{folder} holds a run whose checkpoints are in {previous.root}. To resume it, set "
            f"checkpoint.resume={newest}; to start over, set another run.name"
        )


def _set_aside(folder: Path, note: Callable[[str], None]) -> None:
    """Moves the records of an earlier attempt to `attempts/`, if it measured anything."""
    metrics = folder / "metrics.jsonl"
    if not os.path.lexists(metrics) or os.lstat(metrics).st_size == 0:
        return
    earlier = [int(path.name) for path in (folder / ATTEMPTS).glob("[0-9]*") if path.name.isdecimal()]
    place = folder / ATTEMPTS / str(max(earlier, default=0) + 1)
    try:
        place.mkdir(parents=True)
        for path in folder.iterdir():
            if path.name not in (ATTEMPTS, CHECKPOINTS):
                path.rename(place / path.name)
    except OSError as error:
        raise ConfigError(f"{folder} holds an earlier attempt, which cannot be moved: {error}") from error
    note(f"an earlier attempt ended without a checkpoint: its records are in {place}, and the run starts over")


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    with suppress(FileError, OSError):
        return read_object(path, dict[str, Any], below=path.parent)
    return {}


def settings_yaml(config: Config) -> str:
    """The settings as YAML, without secrets. Redacts values before dumping, since YAML may quote, escape and fold texts."""
    return as_yaml(redacted_values(asdict(config)))
