"""The manifest of a checkpoint: read once, into types. Nothing in it is trusted before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tandem.platform.config.schema import ConfigError
from tandem.platform.system.files import confined
from tandem.platform.system.readers import parse_json, parsed

FORMAT = 1


@dataclass(frozen=True)
class Written:
    """A file as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class RunIdentity:
    """What tells a run from others of its name."""

    id: str
    folder: str  # of its records, as an absolute path


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. Every name is that of a file below the checkpoint's folder."""

    step: int
    score: float | None
    settings: Mapping[str, Any]  # of the run that wrote it, by dotted key
    files: Mapping[str, Written]
    run: RunIdentity | None = None  # that wrote it

    def as_json(self) -> bytes:
        """What `parse` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, default=str).encode()


def parse(content: bytes, where: str) -> Manifest:
    """The manifest that a file holds; `where` names the file in messages.

    Raises:
        ConfigError: it is none; names the field.
    """
    found = parsed(parse_json(content, where), dict[str, Any], where)
    if found.get("format") != FORMAT:
        raise ConfigError(f"{where} has format {found.get('format')!r}, this version reads {FORMAT}")
    manifest = parsed(found, Manifest, where)
    if manifest.step < 0:
        raise ConfigError(f"{where}: field 'step' is {manifest.step}, expected 0 or more")
    for name in manifest.files:
        confined(name, where)
    return manifest
