"""Writes checkpoints atomically, and finds the newest complete checkpoint.

    step-000040/
        manifest.json             written last: size and SHA-256 of every other file
        driver.json               the loop: step, policy version, KL coefficient, rounds sampled, leftover groups
        model/                    configuration and tokenizer, as `from_pretrained` reads them
        actor/00000.safetensors   weights and Adam's moments as whole tensors, in parts
        actor/facts.json          by rank: updates, random generators
        critic/                   the same for the critic, if there is one
        suspect.json              only if the next step failed on these weights: the reason; resume=auto skips it

On a local disk, a checkpoint is written to a temporary folder beside its place, synced, and renamed. An object store cannot
rename, so there a folder without a manifest does not count as a checkpoint. No file is a pickle: reading never runs code.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from fsspec.implementations.local import LocalFileSystem

from tandem.launch.storage.checkpoint import (
    DRIVER,
    FACTS,
    MANIFEST,
    NAME,
    SUSPECT,
    Checkpoint,
    CheckpointError,
    open_at,
    suspicion,
)
from tandem.launch.storage.manifest import Manifest, RunIdentity, Written, parse
from tandem.launch.storage.stores import filesystem, read_file, sync
from tandem.platform.config.schema import ConfigError
from tandem.platform.loop.protocols import Trained
from tandem.platform.system.files import open_regular


class Checkpoints:
    """The checkpoints of one run.

    Args:
        url: folder or fsspec address.
        keep: how many of the newest checkpoints to keep. keep_best: how many of the best to keep in addition.
    """

    def __init__(self, url: str, keep: int, keep_best: int = 0) -> None:
        self.keep, self.keep_best = keep, keep_best
        self.fs, self.root = filesystem(url)
        self._is_local = isinstance(self.fs, LocalFileSystem)
        self.run: RunIdentity | None = None  # the run that writes checkpoints
        self.check_alone: Callable[[], None] = lambda: None  # raises LeaseLost if another run writes here

    def save(
        self,
        step: int,
        driver: Mapping[str, Any],
        roles: Mapping[str, Trained],
        save_model: Callable[[Path], None],
        settings: Mapping[str, Any],
        score: float | None,
    ) -> str:
        """Writes the checkpoint of a step, then removes old checkpoints; returns the path.

        Args:
            save_model: writes configuration and tokenizer into a folder. score: ranks checkpoints; higher is better.

        Raises:
            CheckpointError: it could not be written; older checkpoints are unchanged.
            LeaseLost: another run writes here.
        """
        self.check_alone()
        place = f"{self.root}/step-{step:06d}"
        draft = f"{self.root}/.{uuid.uuid4().hex[:8]}.part" if self._is_local else place
        try:
            self._clear_drafts()
            for name in (MANIFEST, SUSPECT) if not self._is_local else ():
                if self.fs.exists(f"{place}/{name}"):
                    self.fs.rm_file(f"{place}/{name}")  # without a manifest the old checkpoint does not count
            files = {name: self._write(f"{draft}/{name}", content) for name, content in _files(driver, roles, save_model)}
            self._write(f"{draft}/{MANIFEST}", Manifest(step, score, settings, files, self.run).as_json())
            if self._is_local:
                for folder, _, _ in os.walk(draft):
                    sync(folder)
                if self.fs.exists(place):  # left by an earlier attempt at this step
                    os.rename(place, f"{draft}.old.part")
                os.rename(draft, place)
                sync(self.root)
                self._clear_drafts()
        except OSError as error:
            if self._is_local:
                self._remove(draft)
            raise CheckpointError(
                f"checkpoint of step {step}: {self.root} cannot be written: {error}. {self._after_failure()}"
            ) from error
        self._retire(step)
        return place

    def _after_failure(self) -> str:
        newest = self.newest()
        if newest is None:
            return "Make room or set checkpoint.dir, and start the run again: there is no checkpoint yet, so it starts over"
        return (
            "The existing checkpoints are unchanged. Make room and start the run again: it resumes from the newest. Or set "
            f"checkpoint.dir to another place and checkpoint.resume={newest}"
        )

    def find(self, resume: str, note: Callable[[str], None]) -> Checkpoint | None:
        """The checkpoint that `checkpoint.resume` selects; for auto, the newest complete one that is not suspect.

        Raises:
            ConfigError: there is no complete checkpoint at the path; or for auto, there are checkpoints but none is usable.
        """
        if resume == "never":
            return None
        if resume != "auto":
            fs, path = filesystem(resume)
            asked = open_at(fs, path.rstrip("/"))
            if asked.suspicion:
                note(f"warning: {asked.path} is suspect: {asked.suspicion}")
            return asked
        broken, is_suspect = [], False
        for path in reversed(self._folders()):
            try:
                checkpoint = open_at(self.fs, path)
            except ConfigError as error:
                broken.append(str(error))
                continue
            if checkpoint.suspicion:
                is_suspect = True
                broken.append(f"{path} is skipped: {checkpoint.suspicion}")
                continue
            for text in broken:
                note(f"warning: {text}; resuming from {checkpoint.path} instead")
            return checkpoint
        if broken:
            anyway = "Set checkpoint.resume to the path of one to resume from it anyway. " if is_suspect else ""
            anew = "Set checkpoint.resume=never with another run.name to start over"
            raise ConfigError(f"{'; '.join(broken)}. {anyway}{anew}")
        return None

    def distrust(self, step: int, why: str) -> str | None:
        """Marks the checkpoint of a step as suspect; returns its path, or None if there is no such checkpoint."""
        path = f"{self.root}/step-{step:06d}"
        if path not in self._folders():
            return None
        self._write(f"{path}/{SUSPECT}", _json({"why": why}))
        return path

    def check_writable(self) -> None:
        """Checks, before the first step, that checkpoints can be written.

        Raises:
            ConfigError: they cannot; says why.
        """
        probe = f"{self.root}/.{uuid.uuid4().hex[:8]}.part/probe"
        try:
            self._write(probe, b"")
            self.fs.rm(probe.rpartition("/")[0], recursive=True)
        except Exception as error:  # each kind of storage raises its own errors
            raise ConfigError(
                f"{self.root}: checkpoints cannot be written there: {error}. Set checkpoint.dir to a writable place"
            ) from error

    def has_any(self) -> bool:
        """Whether there is any checkpoint, complete or not."""
        return bool(self._folders())

    def holds(self, found: Checkpoint) -> bool:
        """Whether a checkpoint is in this place."""
        return found.path in self._folders()

    def newest(self) -> str | None:
        """The path of the newest checkpoint that is complete and not suspect."""
        return next(filter(self._can_go_on_from, reversed(self._folders())), None)

    def is_newest(self, found: Checkpoint | None) -> bool:
        """Whether `found` is a checkpoint in this place, and all later ones are damaged or suspect."""
        if found is None or not self.holds(found):
            return False
        folders = self._folders()
        return not any(map(self._can_go_on_from, folders[folders.index(found.path) + 1 :]))

    def _can_go_on_from(self, path: str) -> bool:
        with suppress(ConfigError):
            return open_at(self.fs, path).suspicion is None
        return False

    def _whole(self) -> list[tuple[str, float | None]]:
        """Path and score of every checkpoint with a readable manifest that is not suspect, oldest step first."""
        whole = []
        for path in self._folders():
            if suspicion(self.fs, path):
                continue
            with suppress(FileNotFoundError, ConfigError):  # ConfigError: truncated
                where = f"{path}/{MANIFEST}"
                whole.append((path, parse(read_file(self.fs, where, path), where).score))
        return whole

    def _folders(self) -> list[str]:
        """Paths of folders with the name of a checkpoint, oldest step first."""
        self.fs.invalidate_cache()
        if not self.fs.exists(self.root):
            return []
        paths = [str(path).rstrip("/") for path in self.fs.ls(self.root, detail=False)]
        return sorted((path for path in paths if NAME.search(path)), key=_step_of)

    def _retire(self, step: int) -> None:
        """Removes checkpoints that are not kept, manifests first, so a half-removed checkpoint does not count. `step` was
        saved last; checkpoints of later steps are all damaged, do not count, and will be overwritten.
        """
        whole = [(path, score) for path, score in self._whole() if _step_of(path) <= step]
        scored = sorted(((path, score) for path, score in whole if score is not None), key=lambda pair: -pair[1])
        kept = {path for path, _ in [*whole[-self.keep :], *scored[: self.keep_best]]}
        suspect = [path for path in self._folders() if _step_of(path) < step and suspicion(self.fs, path)]
        for path in [*(path for path, _ in whole), *suspect]:
            if path not in kept:
                self._remove(path)

    def _remove(self, path: str) -> None:
        if self._is_local and os.path.islink(path):
            return  # the target of a link is not ours
        try:
            if self.fs.exists(f"{path}/{MANIFEST}"):
                self.fs.rm_file(f"{path}/{MANIFEST}")
            if self.fs.exists(path):
                self.fs.rm(path, recursive=True)
        except OSError:
            pass  # leftovers do no harm

    def _clear_drafts(self) -> None:
        if self._is_local:
            self.fs.makedirs(self.root, exist_ok=True)
            for path in Path(self.root).glob(".*.part"):
                self._remove(str(path))

    def _write(self, path: str, content: bytes) -> Written:
        if self._is_local:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(open_regular(Path(path), flags, below=Path(path).parent), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        else:
            self.fs.pipe_file(path, content)
        return Written(len(content), hashlib.sha256(content).hexdigest())


def _step_of(path: str) -> int:
    match = NAME.search(path)
    assert match is not None, f"{path} is no checkpoint"
    return int(match[1])


def open_newest(path: str) -> Checkpoint:
    """The checkpoint at a path, or the newest complete checkpoint in the folder at the path.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    fs, root = filesystem(path)
    if NAME.search(root):
        return open_at(fs, root)
    checkpoint = Checkpoints(path, keep=1).find("auto", lambda text: None)
    if checkpoint is None:
        raise ConfigError(f"{path}: no checkpoint there, and no folder of checkpoints")
    return checkpoint


def _files(
    driver: Mapping[str, Any], roles: Mapping[str, Trained], save_model: Callable[[Path], None]
) -> Iterator[tuple[str, bytes]]:
    """Yields (name, content) of the files of a checkpoint; holds one part of the tensors in memory at a time."""
    yield DRIVER, _json(driver)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                yield f"model/{path.relative_to(folder)}", path.read_bytes()
    for role, trained in roles.items():
        yield f"{role}/{FACTS}", _json(trained.state_facts())
        for number, part in enumerate(trained.state_parts()):
            whole = {name: tensor.contiguous() for name, tensor in part.items()}
            yield f"{role}/{number:05d}.safetensors", safetensors.torch.save(whole)


def _json(content: Any) -> bytes:
    return json.dumps(content, default=str).encode()
