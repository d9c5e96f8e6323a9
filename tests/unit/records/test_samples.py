"""The samples that a run keeps for inspection."""

from __future__ import annotations

import math

import pytest

from tandem.platform.records.samples import choose


def test_one_prompt_does_not_fill_the_file() -> None:
    """There are four prompts with four samples each; every prompt is chosen once before any is chosen twice."""
    rewards = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    prompts = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    # Lowest: row 5. Highest of all, of another prompt: row 0. Then of prompts 2 and 3: lowest row 8, highest row 12. Then
    # every prompt has come once: lowest row 9, and of the other prompts the first that is right, row 1.
    assert choose(rewards, prompts, 4) == [5, 8, 0, 12]
    assert choose(rewards, prompts, 6) == [5, 8, 9, 0, 12, 1]


def test_best_and_worst_are_kept_even_of_one_prompt() -> None:
    assert choose([0.5, 0.1, 0.9, 0.5, 0.5], [0, 1, 1, 2, 2], 2) == [1, 2]
    assert choose([0.5, 0.1, 0.9, 0.5, 0.5], [0, 1, 1, 2, 2], 3) == [1, 0, 2]


def test_a_failure_comes_before_what_is_right() -> None:
    """Three of 32 samples are wrong; all three are kept, together with samples of other prompts."""
    rewards = [1.0] * 32
    for row in (5, 17, 30):
        rewards[row] = 0.0
    kept = choose(rewards, [row // 4 for row in range(32)], 8)
    assert kept[:3] == [5, 17, 30]
    assert len({row // 4 for row in kept}) == 8


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_what_could_not_be_scored_is_lower_than_any(unknown: float | None) -> None:
    assert choose([-3.0, unknown, 2.0], [0, 1, 2], 1) == [1]
    assert choose([-3.0, unknown, 2.0], [0, 1, 2], 9) == [1, 0, 2]


def test_equal_samples_are_kept_in_their_order() -> None:
    assert choose([1.0] * 6, [0, 0, 1, 1, 2, 2], 4) == [0, 2, 4, 1]
    assert choose([], [], 4) == []


def test_the_example_of_the_docstring() -> None:
    assert choose([1, 1, 1, 0, 1, 1], [7, 7, 8, 8, 9, 9], 3) == [3, 0, 4]
