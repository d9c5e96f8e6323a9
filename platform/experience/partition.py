"""Splits a batch over ranks, balanced by tokens, and into micro-batches, by a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Row numbers for each of `parts` ranks, with about the same number of tokens per rank.

    Assigns rows from longest to shortest, each to the part with the fewest tokens so far; in a tie, to the part with the
    fewest rows. A part can be empty if there are fewer rows than parts.
    """
    assert parts >= 1, f"{parts} parts"
    result: list[list[int]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        lightest = min(range(parts), key=lambda part: (tokens[part], len(result[part]), part))
        result[lightest].append(row)
        tokens[lightest] += lengths[row]
    return [sorted(rows) for rows in result]


def microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row numbers of each micro-batch: rows sorted by length, each micro-batch with at most `max_tokens` incl. padding.

    A micro-batch of n rows costs n x (its longest row). A single row over the budget gets its own micro-batch.
    """
    result: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        # Rows are sorted by length, so the new row is the longest of its micro-batch.
        if result and (len(result[-1]) + 1) * lengths[row] <= max_tokens:
            result[-1].append(row)
        else:
            result.append([row])
    return result
