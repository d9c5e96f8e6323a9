"""The metrics of a step, and structured keys: `eval/<set>/<measure>` and `memory/<role>/<kind>_bytes`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Metrics = dict[str, float]
"""Values by key, such as `reward/mean`."""

DETAILS = ("_low", "_high", "_length_mean", "_truncated_frac", "_unscorable")
"""Suffixes of measures that give details of another measure."""
MEMORY_KEY = re.compile(r"memory/([^/]+)/([^/]+)_bytes")


@dataclass(frozen=True)
class HeldOut:
    """A measure of a held-out set. Example: `HeldOut("math", "greedy").key` is `eval/math/greedy`."""

    name: str  # of the set; may contain slashes
    measure: str

    @property
    def key(self) -> str:
        """The key of the metric."""
        return f"eval/{self.name}/{self.measure}"

    @property
    def is_detail(self) -> bool:
        """Whether this measure gives details of another measure, such as an end of its interval."""
        return self.measure.endswith(DETAILS)


def held_out(keys: Iterable[str]) -> dict[str, HeldOut]:
    """The keys that are measures of held-out sets, without duplicates."""
    evals = (key for key in keys if key.startswith("eval/") and key.count("/") >= 2)
    return {key: HeldOut(*key.removeprefix("eval/").rsplit("/", 1)) for key in evals}


def memory_key(key: str) -> tuple[str, str] | None:
    """Role and kind of a metric `memory/<role>/<kind>_bytes`; None for any other key."""
    match = MEMORY_KEY.fullmatch(key)
    return (match[1], match[2]) if match else None
