"""Selects the samples of a step that are saved for inspection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def choose(rewards: Sequence[float | None], prompts: Sequence[int], kept: int) -> list[int]:
    """Representative rows of a batch, sorted by reward, lowest first. Deterministic: uses no random numbers.

    1. The row with the lowest reward, then the row with the highest. An unscorable sample is lower than any other.
    2. Alternately the lowest and the highest reward among the rows of the prompts chosen least often so far. Every prompt
       is chosen once before any is chosen twice, and half of the rows are failures, if there are enough.

    Ties go to the prompt chosen less often, then to the earlier row.

    Args:
        rewards: of each row; None: unscorable. prompts: prompt number of each row. kept: largest number of rows.

    Example: `choose([1, 1, 1, 0, 1, 1], [7, 7, 8, 8, 9, 9], 3)` is `[3, 0, 4]`: the failure, and one row per other prompt.
    """
    assert len(rewards) == len(prompts), f"{len(rewards)} rewards of {len(prompts)} rows"
    worth = [-math.inf if reward is None or math.isnan(reward) else reward for reward in rewards]
    taken: Counter[int] = Counter()
    chosen: list[int] = []
    if kept >= len(worth):
        return sorted(range(len(worth)), key=lambda row: worth[row])
    while len(chosen) < kept:
        sign = -1.0 if len(chosen) % 2 else 1.0
        left = set(range(len(worth))).difference(chosen)
        if len(chosen) < 2:
            row = min(left, key=lambda row: (sign * worth[row], taken[prompts[row]], row))
        else:
            row = min(left, key=lambda row: (taken[prompts[row]], sign * worth[row], row))
        taken[prompts[row]] += 1
        chosen.append(row)
    order = {row: place for place, row in enumerate(chosen)}
    return sorted(chosen, key=lambda row: (worth[row], order[row]))
