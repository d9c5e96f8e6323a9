"""The manifest of a checkpoint, parsed into typed records before anything in it is used."""

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
    """Size and digest of a file as written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run, which distinguishes it from others with the same name."""

    id: str
    folder: str  # of its records, as an absolute path


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. Every name is that of a file below the checkpoint's folder."""

    step: int
    score: float | None
    settings: Mapping[str, Any]  # of the run that wrote the checkpoint, by dotted key
    files: Mapping[str, Written]
    run: RunIdentity | None = None  # the run that wrote the checkpoint

    def as_json(self) -> bytes:
        """The JSON that `parse` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, default=str).encode()


def parse(content: bytes, where: str) -> Manifest:
    """Parses the content of a manifest file; `where` names the file in messages.

    Raises:
        ConfigError: the content is not a manifest; names the field.
    """
    fields = parsed(parse_json(content, where), dict[str, Any], where)
    if fields.get("format") != FORMAT:
        raise ConfigError(f"{where} has format {fields.get('format')!r}, this version reads {FORMAT}")
    manifest = parsed(fields, Manifest, where)
    if manifest.step < 0:
        raise ConfigError(f"{where}: field 'step' is {manifest.step}, expected 0 or more")
    for name in manifest.files:
        confined(name, where)
    return manifest
