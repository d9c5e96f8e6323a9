"""Opens and reads one checkpoint; checks every file against the manifest. Reading never runs code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from tandem.launch.storage.manifest import Manifest, Written, parse
from tandem.launch.storage.stores import base, read_file
from tandem.platform.config.schema import ConfigError
from tandem.platform.system.files import FileError, refuse_links
from tandem.platform.system.readers import parse_json, parsed

T = TypeVar("T")
MANIFEST, DRIVER, FACTS, SUSPECT = "manifest.json", "driver.json", "facts.json", "suspect.json"
NAME = re.compile(r"(?:^|/)step-(\d{6,})$")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or has changed since it was written."""


class Checkpoint:
    """One complete checkpoint."""

    def __init__(self, fs: Any, path: str, manifest: Manifest) -> None:
        self.fs, self.path, self.manifest, self.step = fs, path, manifest, manifest.step

    @property
    def suspicion(self) -> str | None:
        """The reason why its weights are suspect; None if they are not."""
        return suspicion(self.fs, self.path)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings, by dotted key, of the run that wrote the checkpoint."""
        return self.manifest.settings

    def driver(self) -> dict[str, Any]:
        """The state of the loop."""
        return self._parsed(DRIVER, dict[str, Any])

    def facts(self, role: str) -> list[dict[str, Any]]:
        """The state of a role besides tensors, by rank."""
        return self._parsed(f"{role}/{FACTS}", list[dict[str, Any]])

    def parts(self, role: str) -> Iterator[dict[str, Tensor]]:
        """The tensors of a role, part by part."""
        for name in sorted(self.manifest.files):
            if name.startswith(f"{role}/") and name.endswith(".safetensors"):
                yield _tensors(self._read(name), f"{self.path}/{name}")

    def has(self, role: str) -> bool:
        """Whether the role was saved."""
        return f"{role}/{FACTS}" in self.manifest.files

    def copy_model(self, folder: Path) -> None:
        """Writes configuration and tokenizer into a local folder. `manifest.parse` has checked that names stay below it."""
        for name in self.manifest.files:
            if name.startswith("model/"):
                target = folder / name.removeprefix("model/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self._read(name))

    def _read(self, name: str) -> bytes:
        expected = self.manifest.files[name]
        content = read_file(self.fs, f"{self.path}/{name}", self.path, limit=expected.bytes)
        if Written(len(content), hashlib.sha256(content).hexdigest()) != expected:
            raise CheckpointError(
                f"{self.path}/{name} has changed since it was written. Remove {self.path} to resume from the previous "
                "checkpoint"
            )
        return content

    def _parsed(self, name: str, kind: type[T]) -> T:
        where = f"{self.path}/{name}"
        return parsed(parse_json(self._read(name), where), kind, where)


def open_at(fs: Any, path: str) -> Checkpoint:
    """Opens the checkpoint at a path, if every file exists with the right size.

    Raises:
        ConfigError: the checkpoint is incomplete; says what is missing.
    """
    try:
        content = read_file(fs, f"{path}/{MANIFEST}", path)
    except FileNotFoundError:
        raise ConfigError(f"{path} is not a complete checkpoint: it has no {MANIFEST}, which is written last") from None
    except OSError as error:
        raise ConfigError(f"{path} is not a complete checkpoint: {MANIFEST} cannot be read: {error}") from error
    manifest = parse(content, f"{path}/{MANIFEST}")
    for name, expected in manifest.files.items():
        if isinstance(fs, LocalFileSystem):
            refuse_links(Path(path, name), base(path))
        size = fs.size(f"{path}/{name}") if fs.exists(f"{path}/{name}") else None
        if size != expected.bytes:
            there = "is missing" if size is None else f"has {size} bytes"
            raise ConfigError(f"{path} is not a complete checkpoint: {name} {there}, {expected.bytes} bytes were written")
    return Checkpoint(fs, path, manifest)


def suspicion(fs: Any, path: str) -> str | None:
    """The reason why the weights of the checkpoint at a path are suspect; None if they are not."""
    where = f"{path}/{SUSPECT}"
    try:
        why = parsed(parse_json(read_file(fs, where, path), where), dict[str, Any], where).get("why")
    except FileNotFoundError:
        return None
    except (FileError, OSError):
        why = None  # the mark counts even if its reason cannot be read
    return str(why or "it is marked as suspect")


def _tensors(content: bytes, where: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{where} holds no tensors: {error}") from error
