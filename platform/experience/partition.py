"""Cuts of a batch: over ranks, balanced by tokens, and into micro-batches, by a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Row numbers for each of `parts` ranks, so that their tokens are about equal.

    Longest row first, each to the part with the fewest tokens so far, of those the one with the fewest rows. A part may
    be empty when there are fewer rows than parts.
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
    """Row numbers of each micro-batch: rows sorted by length, each batch at most `max_tokens` with its padding.

    A micro-batch of n rows costs n x (its longest row). A single row over the budget is a batch of its own.
    """
    result: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        # Rows come shortest first, so the new row is the longest of the batch it joins.
        if result and (len(result[-1]) + 1) * lengths[row] <= max_tokens:
            result[-1].append(row)
        else:
            result.append([row])
    return result
