"""The folder of a run: named, claimed for one process, and never one that holds results."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.launch.facts import about
from tandem.launch.versions import versions
from tandem.platform.config import Config, ConfigError
from tandem.platform.records import write_json, write_text
from tandem.platform.redact import redacted_values

if TYPE_CHECKING:  # the witness of a run needs this file, and torch would take it seconds
    from tandem.launch.checkpoints import Checkpoint, Checkpoints


@contextmanager
def claimed(folder: Path) -> Iterator[int]:
    """A folder, made if need be, which no other process writes runs into during the body.

    The lock is that of the descriptor which is given; a child that inherits it holds the folder on.

    Raises:
        ConfigError: another process does, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir={folder.parent}: the run's folder cannot be written: {error}") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"another process trains into {folder}. Wait for it to end, or set another folder or name"
        ) from error
    except OSError:  # some network file systems cannot lock a folder
        return


def name_run(config: Config, started_at: float) -> None:
    """Fills in run.name."""
    if config.run.name is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started_at))
        config.run.name = f"{config.algo.name}-seed{config.run.seed}-{stamp}-{os.getpid()}"


def folder_of(config: Config) -> Path:
    """Where a run that has a name leaves its records."""
    return Path(config.run.dir) / str(config.run.name)


def check_folder(config: Config, checkpoints: Checkpoints, found: Checkpoint | None) -> None:
    """Refuses a folder that holds a run already, where this one does not go on from its newest checkpoint.

    Raises:
        ConfigError: with what to set.
    """
    folder = folder_of(config)
    if config.checkpoint.dir is not None and checkpoints.has_any() and not checkpoints.is_newest(found):
        raise ConfigError(
            f"{checkpoints.root} holds checkpoints of a run of this name, and with checkpoint.resume="
            f"{config.checkpoint.resume} this one does not go on from the newest. Set another run.name"
        )
    if (folder / "metrics.jsonl").exists() and not _never_began(folder) and not checkpoints.is_newest(found):
        if found is None:
            raise ConfigError(
                f"{folder} holds a run already, without a checkpoint to go on from (checkpoint.resume="
                f"{config.checkpoint.resume}). Set another run.name, or move the folder away"
            )
        raise ConfigError(
            f"{folder} holds a run already, and checkpoint.resume={config.checkpoint.resume} is not its newest checkpoint. "
            "Set another run.name to branch off from there"
        )


def make_folder(config: Config, started_at: float) -> Path:
    """The run's folder with `config.yaml`, `versions.json` and `run.json`.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = folder_of(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").unlink(missing_ok=True)
        write_text(folder / "config.yaml", _as_yaml(config))
        write_json(folder / "versions.json", versions())
        write_json(folder / "run.json", about(config, started_at))
    except OSError as error:
        raise ConfigError(f"run.dir={config.run.dir}: the run's folder cannot be written: {error}") from error
    return folder


def _never_began(folder: Path) -> bool:
    """Whether the run in `folder` ended before it measured anything, so that nothing is lost with it."""
    return (folder / "summary.json").exists() and (folder / "metrics.jsonl").stat().st_size == 0


def _as_yaml(config: Config) -> str:
    """The settings without secrets. They are taken out of the values: in YAML a text may be quoted, escaped and folded."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(OmegaConf.structured(config), resolve=False)
    return OmegaConf.to_yaml(OmegaConf.create(redacted_values(values)))
