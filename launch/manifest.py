"""The manifest of a checkpoint: read once, into types. Nothing in it is trusted before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tandem.platform.config import ConfigError

FORMAT = 1
LONGEST_NAME = 4096  # characters


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
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    found = _typed(found, dict, "it", where)
    if found.get("format") != FORMAT:
        raise ConfigError(f"{where} has format {found.get('format')!r}, this version reads {FORMAT}")
    step, score = _typed(found.get("step"), int, "step", where), found.get("score")
    if step < 0 or (score is not None and type(score) not in (int, float)):
        raise ConfigError(f"{where}: step is {step} and score {score!r}; expected a whole number, and a number or null")
    files = {
        confined(name, where): Written(
            _typed(_typed(facts, dict, name, where).get("bytes"), int, f"{name}.bytes", where),
            _typed(facts.get("sha256"), str, f"{name}.sha256", where),
        )
        for name, facts in _typed(found.get("files"), dict, "files", where).items()
    }
    settings = _typed(found.get("settings"), dict, "settings", where)
    return Manifest(step, score, settings, files, _run(found.get("run"), where))


def _run(found: Any, where: str) -> RunIdentity | None:
    if found is None:
        return None
    facts = _typed(found, dict, "run", where)
    return RunIdentity(*(_typed(facts.get(field), str, f"run.{field}", where) for field in ("id", "folder")))


def confined(name: str, where: str) -> str:
    """A name that stays below the folder it is joined to.

    Raises:
        ConfigError: it is absolute, goes up, or means something else to some file system.
    """
    parts = name.split("/")
    if (
        any(part in ("", ".", "..") or part != part.strip() for part in parts)
        or any(character in name for character in "\\:\0")
        or not name.isprintable()
        or len(name) > LONGEST_NAME
    ):
        raise ConfigError(
            f"{where} names the file {name[:200]!r}, which is no path below its folder. It was not written by tandem"
        )
    return name


def _typed(value: Any, kind: type, field: str, where: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {dict: "an object", int: "a whole number", str: "text"}
        raise ConfigError(f"{where}: {field} is {type(value).__name__}, expected {names[kind]}")
    return value
