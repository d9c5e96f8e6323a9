"""Reward shaping, against numbers worked out on paper."""

from __future__ import annotations

import math
from typing import Any

import pytest
from unit_batches import make_rollout

from tandem.platform.config.schema import RewardConfig
from tandem.platform.experience.batch import Score
from tandem.platform.rewards.shaping import OVERLONG, RewardShaper, RunningMoments, overlong_buffer, overlong_penalty

LONGEST = 10


@pytest.mark.parametrize(
    ("longest", "buffer", "table"),
    [
        (100, 20, {0: 0, 80: 0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1, 101: -1}),
        (100, 0, {99: 0, 100: 0, 101: -1}),
        (20480, 4096, {16384: 0, 18432: -0.5, 20480: -1}),
        (4, 4, {0: 0, 1: -0.25, 4: -1}),
    ],
)
def test_overlong_penalty(longest: int, buffer: int, table: dict[int, float]) -> None:
    assert {tokens: overlong_penalty(tokens, longest, buffer) for tokens in table} == pytest.approx(table)


@pytest.mark.parametrize("buffer", [-1, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer: int) -> None:
    with pytest.raises(AssertionError, match="does not fit into 100"):
        overlong_penalty(50, 100, buffer)


def test_the_buffer_is_a_fifth_of_the_longest_response_unless_given() -> None:
    assert overlong_buffer(RewardConfig(), 20480) == 4096
    assert overlong_buffer(RewardConfig(overlong_buffer_tokens=0), 20480) == 0


def test_running_moments_do_not_depend_on_how_numbers_arrive() -> None:
    # 1, 2, 3, 4, 10: mean 4, squares 9 + 4 + 1 + 0 + 36 = 50, variance 10
    for cuts in ([[1, 2, 3, 4, 10]], [[1], [2], [3], [4], [10]], [[], [1, 2], [3, 4, 10], []]):
        moments = RunningMoments()
        for cut in cuts:
            moments.add([float(number) for number in cut])
        assert moments.count == 5
        assert moments.mean == pytest.approx(4)
        assert moments.std == pytest.approx(math.sqrt(10))


def test_running_moments_of_numbers_far_from_zero_keep_their_digits() -> None:
    # 4, 7, 13, 16 and a billion each: mean 10, squares 36 + 9 + 9 + 36 = 90, variance 22.5
    moments = RunningMoments()
    moments.add([1e9 + 4, 1e9 + 7])
    moments.add([1e9 + 13, 1e9 + 16])
    assert moments.mean == 1e9 + 10
    assert moments.std == pytest.approx(math.sqrt(22.5), abs=1e-6)


def test_running_moments_of_nothing() -> None:
    moments = RunningMoments()
    assert (moments.count, moments.mean, moments.std) == (0, 0.0, 0.0)


def shaped(config: RewardConfig, score: Score, tokens: int = 2, seen: tuple[float, ...] = ()) -> Score:
    """The score of a response with this many tokens, after the rewards in `seen`."""
    shaper = RewardShaper(config, LONGEST)
    shaper.observe([Score(reward) for reward in seen])
    (found,) = shaper.shape([make_rollout(response=[5] * tokens)], [score])
    return found


def test_shaping_is_off_by_default() -> None:
    score = Score(3.0, {"a": 3.0}, steps={0: 1.0, 1: 2.0})
    assert shaped(RewardConfig(), score, tokens=LONGEST, seen=(1, 2, 5)) == score
    assert score.raw is None


@pytest.mark.parametrize("values", [{"normalize": "std"}, {"scale": 2.0}, {"clip": 5.0}, {"overlong_penalty": 1.0}])
def test_any_shaping_keeps_the_reward_before_it(values: dict[str, Any]) -> None:
    assert shaped(RewardConfig(**values), Score(3.0)).raw == 3.0


def test_an_unscored_sample_stays_unscored_and_is_not_observed() -> None:
    config = RewardConfig(normalize="mean_std", overlong_penalty=1.0, clip=1.0)
    score = Score(None, {"a": None}, "timeout")
    assert shaped(config, score, tokens=LONGEST) == score
    shaper = RewardShaper(config, LONGEST)
    shaper.observe([score, Score(4.0)])
    assert (shaper.moments.count, shaper.moments.mean) == (1, 4.0)


def test_shaping_happens_in_order() -> None:
    # seen 1 and 3: mean 2, std 1. (3.5 - 2) x 4 = 6, clipped to 5, less 2 x .5 (nine tokens, one into a buffer of two)
    config = RewardConfig(normalize="mean_std", scale=4.0, clip=5.0, overlong_penalty=2.0, overlong_buffer_tokens=2)
    found = shaped(config, Score(3.5, {"a": 3.5}), tokens=9, seen=(1, 3))
    assert found.reward == pytest.approx(4.0, abs=1e-4)
    assert found.parts == {"a": 3.5, OVERLONG: -1.0}
    assert (found.raw, found.accuracy) == (3.5, 3.5)


@pytest.mark.parametrize(("normalize", "expected"), [("none", 6.0), ("std", 3.0), ("mean_std", 0.5)])
def test_normalisation(normalize: str, expected: float) -> None:
    # seen 3 and 7: mean 5, std 2
    assert shaped(RewardConfig(normalize=normalize), Score(6.0), seen=(3, 7)).reward == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("reward", "expected"), [(9.0, 2.0), (-9.0, -2.0), (1.5, 1.5)])
def test_rewards_are_clipped_on_both_sides(reward: float, expected: float) -> None:
    assert shaped(RewardConfig(clip=2.0), Score(reward)).reward == expected


def test_the_penalty_counts_tokens_and_comes_after_the_clip() -> None:
    config = RewardConfig(clip=1.0, overlong_penalty=0.5, overlong_buffer_tokens=4)
    rewards = [shaped(config, Score(7.0), tokens=tokens).reward for tokens in (6, 7, 8, 10)]
    assert rewards == [1.0, 0.875, 0.75, 0.5]


def test_step_rewards_are_scaled_and_clipped_but_not_shifted() -> None:
    # seen 3 and 7: std 2. 1 / 2 = .5; 8 / 2 = 4, clipped to 3
    found = shaped(RewardConfig(normalize="mean_std", clip=3.0), Score(9.0, steps={0: 1.0, 1: 8.0}), seen=(3, 7))
    assert found.steps == pytest.approx({0: 0.5, 1: 3.0}, abs=1e-5)
    assert found.reward == pytest.approx(2.0, abs=1e-5)


@pytest.mark.parametrize("reward", [0.1, 1.0, -5.0])
def test_rewards_that_have_not_varied_yet_are_not_blown_up(reward: float) -> None:
    seen = (reward, reward, reward)
    assert shaped(RewardConfig(normalize="std"), Score(reward), seen=seen).reward == pytest.approx(reward)
    assert shaped(RewardConfig(normalize="mean_std"), Score(reward), seen=seen).reward == pytest.approx(0, abs=1e-9)
    assert shaped(RewardConfig(normalize="std"), Score(reward)).reward == pytest.approx(reward)
