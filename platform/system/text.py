"""Formats numbers, tables and suggestions as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most similar to `word`; None if no similarity reaches `cutoff` (0 to 1)."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """'. Did you mean x?' for the nearest known word, or an empty text."""
    suggestion = nearest(word, known, cutoff)
    return f". Did you mean {suggestion}?" if suggestion else ""


def shorten(text: str, limit: int = 80) -> str:
    """The text, cut in the middle to at most `limit` characters."""
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def human_bytes(count: float) -> str:
    """Formats a number of bytes. Example: 12345678 gives '11.8 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Rows as text in aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
