"""The names of our settings in other frameworks, for suggestions in messages and for the table of docs/migration.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Named:
    """A setting of ours and its names in TRL, verl and OpenRLHF."""

    ours: str
    trl: Sequence[str] = ()
    verl: Sequence[str] = ()
    openrlhf: Sequence[str] = ()
    note: str = ""


@cache
def names() -> tuple[Named, ...]:
    """All settings that have another name elsewhere."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return tuple(Named(ours, **line) for ours, line in table.items())


def ours(name: str) -> Named | None:
    """Our setting for a name in another framework, given with or without its dotted path."""
    wanted = name.lstrip("-").replace("-", "_")
    full = {other: named for named in reversed(names()) for other in (*named.trl, *named.verl, *named.openrlhf)}
    by_leaf = {other.rpartition(".")[2]: named for other, named in full.items()}  # the first in the table wins
    return full.get(wanted) or by_leaf.get(wanted.rpartition(".")[2])
