"""How a setting is declared."""

from __future__ import annotations

import operator
from dataclasses import field
from typing import Any

BOUNDS = (("at_least", operator.ge, "at least"), ("above", operator.gt, "above"), ("at_most", operator.le, "at most"))
"""Kinds of bounds, each with what must hold between a value and it, and in words."""


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    or_path: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """A dataclass field that knows its meaning, choices and bounds (None passes every bound).

    Args:
        or_path: beside its choices, `path.py:name` may be given.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    metadata = {"help": help, "choices": choices, "or_path": or_path, **bounds}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
