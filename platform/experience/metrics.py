"""The numbers of a step, and the keys that have parts: `eval/<set>/<measure>` and `memory/<role>/<kind>_bytes`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Metrics = dict[str, float]
"""Values by key, as `reward/mean`."""

DETAILS = ("_low", "_high", "_length_mean", "_truncated_frac", "_unscorable")
"""Ends of measures that say more about another one."""
MEMORY_KEY = re.compile(r"memory/([^/]+)/([^/]+)_bytes")


@dataclass(frozen=True)
class HeldOut:
    """A measure of a held-out set. Example: `HeldOut("math", "greedy").key` is `eval/math/greedy`."""

    name: str  # of the set; may hold slashes
    measure: str

    @property
    def key(self) -> str:
        """The metric."""
        return f"eval/{self.name}/{self.measure}"

    @property
    def is_detail(self) -> bool:
        """Whether it says more about another measure, as the ends of an interval do."""
        return self.measure.endswith(DETAILS)


def held_out(keys: Iterable[str]) -> dict[str, HeldOut]:
    """Those of the keys that are measures of held-out sets, each once."""
    found = (key for key in keys if key.startswith("eval/") and key.count("/") >= 2)
    return {key: HeldOut(*key.removeprefix("eval/").rsplit("/", 1)) for key in found}


def memory_key(key: str) -> tuple[str, str] | None:
    """Role and kind of a metric `memory/<role>/<kind>_bytes`; None for others."""
    found = MEMORY_KEY.fullmatch(key)
    return (found[1], found[2]) if found else None
