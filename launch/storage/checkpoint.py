"""One checkpoint: opened if it is whole, read with every file checked against its manifest. Reading never runs code."""

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
    """A checkpoint could not be written, or is not what was written."""


class Checkpoint:
    """One checkpoint that is there."""

    def __init__(self, fs: Any, path: str, manifest: Manifest) -> None:
        self.fs, self.path, self.manifest, self.step = fs, path, manifest, manifest.step

    @property
    def suspicion(self) -> str | None:
        """Why its weights are not to be trusted; None if nothing is known against them."""
        return suspicion(self.fs, self.path)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run that wrote it, by dotted key."""
        return self.manifest.settings

    def driver(self) -> dict[str, Any]:
        """The state of the loop."""
        return self._parsed(DRIVER, dict[str, Any])

    def facts(self, role: str) -> list[dict[str, Any]]:
        """What the ranks of a role kept besides tensors."""
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
        """Writes configuration and tokenizer into a local folder; names are confined to it when the manifest is read."""
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
                f"{self.path}/{name} is not what was written: its content has changed. Remove {self.path} to go on from "
                "the checkpoint before"
            )
        return content

    def _parsed(self, name: str, kind: type[T]) -> T:
        where = f"{self.path}/{name}"
        return parsed(parse_json(self._read(name), where), kind, where)


def open_at(fs: Any, path: str) -> Checkpoint:
    """The checkpoint at a path, if every file is there with its size.

    Raises:
        ConfigError: what is missing.
    """
    try:
        content = read_file(fs, f"{path}/{MANIFEST}", path)
    except FileNotFoundError:
        raise ConfigError(f"{path} is no whole checkpoint: it has no {MANIFEST}, which is written last") from None
    except OSError as error:
        raise ConfigError(f"{path} is no whole checkpoint: {MANIFEST} cannot be read: {error}") from error
    manifest = parse(content, f"{path}/{MANIFEST}")
    for name, expected in manifest.files.items():
        if isinstance(fs, LocalFileSystem):
            refuse_links(Path(path, name), base(path))
        size = fs.size(f"{path}/{name}") if fs.exists(f"{path}/{name}") else None
        if size != expected.bytes:
            there = "is missing" if size is None else f"has {size} bytes"
            raise ConfigError(f"{path} is no whole checkpoint: {name} {there}, {expected.bytes} bytes were written")
    return Checkpoint(fs, path, manifest)


def suspicion(fs: Any, path: str) -> str | None:
    """Why the weights of the checkpoint at a path are not to be trusted; None if nothing is known against them."""
    where = f"{path}/{SUSPECT}"
    try:
        why = parsed(parse_json(read_file(fs, where, path), where), dict[str, Any], where).get("why")
    except FileNotFoundError:
        return None
    except (FileError, OSError):
        why = None  # it is marked, whatever has become of the reason
    return str(why or "it is marked as suspect")


def _tensors(content: bytes, where: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{where} holds no tensors: {error}") from error
