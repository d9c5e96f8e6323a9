"""Rows of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row of a data set, before it is tokenised.

    Example: `Row(prompt="37+48=", answer="85", metadata={"source": "school"})`.
    """

    prompt: str | list[dict[str, str]]  # text, or chat messages
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
