"""Declares settings with their help text, choices and bounds."""

from __future__ import annotations

import operator
from dataclasses import field
from typing import Any

BOUNDS = (("at_least", operator.ge, "at least"), ("above", operator.gt, "above"), ("at_most", operator.le, "at most"))
"""Kinds of bounds: name, comparison of a value with the bound, words for messages."""


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
    """A dataclass field with a help text, choices and bounds (None passes every bound).

    Args:
        or_path: the value may also be `path.py:name`.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most}
    metadata = {"help": help, "choices": choices, "or_path": or_path, **bounds}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
