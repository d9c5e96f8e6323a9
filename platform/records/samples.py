"""Which samples of a step are kept to be looked at."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def choose(rewards: Sequence[float | None], prompts: Sequence[int], kept: int) -> list[int]:
    """Rows of a batch that show how it went, the lowest reward first: no random numbers, so the same batch gives the same.

    1. The row with the lowest reward, then the one with the highest. A sample that could not be scored is lower than any.
    2. In turns the lowest and the highest reward among the rows of those prompts that have been taken least often: every
       prompt comes once before one comes twice, and half of the rows are failures, as long as there are any.

    Ties go to a prompt taken less often, then to the earlier row.

    Args:
        rewards: of each row; None: could not be scored. prompts: the number of each row's prompt. kept: rows, at most.

    Example: `choose([1, 1, 1, 0, 1, 1], [7, 7, 8, 8, 9, 9], 3)` is `[3, 0, 4]`: the failure, and one of each other prompt.
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
