"""One checkpoint: opened if it is whole, read with every file checked against its manifest. Reading never runs code."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from tandem.launch.manifest import Manifest, Written, parse
from tandem.platform.config import ConfigError

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
        return dict(self._parsed(DRIVER, dict))

    def facts(self, role: str) -> list[dict[str, Any]]:
        """What the ranks of a role kept besides tensors."""
        return list(self._parsed(f"{role}/{FACTS}", list))

    def parts(self, role: str) -> Iterator[dict[str, Tensor]]:
        """The tensors of a role, part by part."""
        for name in sorted(self.manifest.files):
            if name.startswith(f"{role}/") and name.endswith(".safetensors"):
                yield safetensors.torch.load(self._read(name))

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
        content: bytes = self.fs.cat_file(f"{self.path}/{name}")
        if Written(len(content), hashlib.sha256(content).hexdigest()) != expected:
            raise CheckpointError(
                f"{self.path}/{name} is not what was written: its content has changed. Remove {self.path} to go on from "
                "the checkpoint before"
            )
        return content

    def _parsed(self, name: str, kind: type) -> Any:
        """The object or list that a file holds."""
        try:
            content = json.loads(self._read(name))
        except ValueError as error:
            raise CheckpointError(f"{self.path}/{name} is no JSON: {error}") from error
        if not isinstance(content, kind):
            raise CheckpointError(f"{self.path}/{name} holds {type(content).__name__}, expected {kind.__name__}")
        return content


def open_at(fs: Any, path: str) -> Checkpoint:
    """The checkpoint at a path, if every file is there with its size.

    Raises:
        ConfigError: what is missing.
    """
    try:
        content = fs.cat_file(f"{path}/{MANIFEST}")
    except FileNotFoundError:
        raise ConfigError(f"{path} is no whole checkpoint: it has no {MANIFEST}, which is written last") from None
    except OSError as error:
        raise ConfigError(f"{path} is no whole checkpoint: {MANIFEST} cannot be read: {error}") from error
    manifest = parse(content, f"{path}/{MANIFEST}")
    for name, expected in manifest.files.items():
        if link := _link_on_the_way(fs, path, name):
            raise ConfigError(f"{path} is no checkpoint as it was written: {link} is a link, which is not followed")
        size = fs.size(f"{path}/{name}") if fs.exists(f"{path}/{name}") else None
        if size != expected.bytes:
            there = "is missing" if size is None else f"has {size} bytes"
            raise ConfigError(f"{path} is no whole checkpoint: {name} {there}, {expected.bytes} bytes were written")
    return Checkpoint(fs, path, manifest)


def _link_on_the_way(fs: Any, path: str, name: str) -> str | None:
    """The first part of a name below a local folder that is a link."""
    place = path
    for part in name.split("/") if isinstance(fs, LocalFileSystem) else ():
        place = f"{place}/{part}"
        if os.path.islink(place):
            return place
    return None


def suspicion(fs: Any, path: str) -> str | None:
    try:
        content = json.loads(fs.cat_file(f"{path}/{SUSPECT}"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError):
        content = None  # it is marked, whatever has become of the reason
    why = content.get("why") if isinstance(content, dict) else None
    return str(why or "it is marked as suspect")


def filesystem(url: str) -> tuple[Any, str]:
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"checkpoint.dir={url}: {error}. Install what it needs, or give a folder") from error
    return fs, str(root).rstrip("/")
