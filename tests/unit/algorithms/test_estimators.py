"""The critic-free advantage estimators, against small numbers worked out on paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from unit_batches import batch_of

from tandem.platform.algorithms.advantages import (
    against_greedy,
    batch_relative,
    gae,
    group_relative,
    leave_one_out,
    length_adaptive_lambda,
    length_weighted,
    process_relative,
    rewards_to_go,
)
from tandem.platform.algorithms.credit import credit
from tandem.platform.algorithms.registry import resolve
from tandem.platform.config.algo import AlgoConfig
from tandem.platform.experience.batch import Inferred, Values

ONE_GROUP = [0, 0, 0, 0, 0, 0, 0, 0]


def bools(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.bool)


@pytest.mark.parametrize(
    ("rewards", "groups", "expected"),
    [
        ([1, 0, 0], [0, 0, 0], [1, -0.5, -0.5]),
        ([3, 1, 2], [0, 0, 0], [1.5, -1.5, 0]),  # the others' means: 1.5, 2.5, 2
        ([1, 5, 0, 3], [6, 2, 6, 2], [1, 2, -1, -2]),
        ([0, *[0.95] * 7], ONE_GROUP, [-0.95, *[0.95 / 7] * 7]),  # the others' means: .95; 6 x .95 / 7
        ([4], [0], [0]),
    ],
)
def test_leave_one_out(rewards: list[float], groups: list[int], expected: list[float]) -> None:
    scored = torch.ones(len(rewards), dtype=torch.bool)
    found = leave_one_out(torch.tensor(rewards, dtype=torch.float32), torch.tensor(groups), scored)
    assert np.allclose(found, expected, atol=1e-6)


def test_leave_one_out_leaves_out_what_was_not_scored() -> None:
    found = leave_one_out(torch.tensor([1.0, math.nan, 0, 0.5]), torch.zeros(4), bools(1, 0, 1, 1))
    # means of the others: .25, -, .75, .5
    assert found.tolist() == [0.75, 0, -0.75, 0]


def test_rewards_far_from_zero_keep_their_digits() -> None:
    # mean 4096 + 1/3; in float32 it would be off by 1e-4
    scores, ones = torch.tensor([4097.0, 4096, 4096]), bools(1, 1, 1)
    assert np.allclose(group_relative(scores, torch.zeros(3), ones, group_std="none"), [2 / 3, -1 / 3, -1 / 3], atol=1e-6)
    assert np.allclose(leave_one_out(scores, torch.zeros(3), ones), [1, -0.5, -0.5], atol=1e-6)
    assert np.allclose(batch_relative(scores, ones), [2 / 3, -1 / 3, -1 / 3], atol=1e-6)


def test_batch_relative() -> None:
    # scored: 1, 0, 0, 2, mean .75, whatever group they are of
    found = batch_relative(torch.tensor([1.0, 0, 0, math.nan, 2]), bools(1, 1, 1, 0, 1))
    assert found.tolist() == [0.25, -0.75, -0.75, 0, 1.25]


@pytest.mark.parametrize(
    ("rewards", "lengths", "expected"),
    [
        ([1, 0], [1, 3], [0.75, -0.25]),  # baseline 1 / 4
        ([2, 1, 0], [1, 1, 2], [1.25, 0.25, -0.75]),  # baseline 3 / 4
        ([1, 0], [2, 2], [0.5, -0.5]),  # equal lengths: the plain mean
        ([1, 0], [0, 3], [1, 0]),  # an empty response weighs nothing: baseline 0
        ([1, 0], [0, 0], [0, 0]),  # no token to learn from
    ],
)
def test_length_weighted(rewards: list[float], lengths: list[int], expected: list[float]) -> None:
    n = len(rewards)
    scores, ones = torch.tensor(rewards, dtype=torch.float32), torch.ones(n, dtype=torch.bool)
    assert length_weighted(scores, torch.tensor(lengths), torch.zeros(n), ones).tolist() == expected


def test_length_weighted_leaves_out_what_was_not_scored() -> None:
    scores, lengths = torch.tensor([1.0, math.nan, 0]), torch.tensor([1, 100, 3])
    assert length_weighted(scores, lengths, torch.zeros(3), bools(1, 0, 1)).tolist() == [0.75, 0, -0.25]


def test_length_weighted_makes_the_advantages_of_tokens_add_up_to_zero() -> None:
    scores, lengths = torch.tensor([1.0, 0, 0.25, -3]), torch.tensor([3, 8, 1, 5])
    found = length_weighted(scores, lengths, torch.zeros(4), bools(1, 1, 1, 1))
    assert float((found * lengths).sum()) == pytest.approx(0, abs=1e-5)


def test_against_greedy() -> None:
    scores, baselines = torch.tensor([1.0, 0, 1, 1, math.nan]), torch.tensor([1, 1, 0.25, math.nan, 1])
    assert against_greedy(scores, baselines, bools(1, 1, 1, 1, 0)).tolist() == [0, -1, 0.75, 0, 0]


# Row 0: four tokens, steps end at the second (worth 1) and the fourth (0). Row 1: three tokens, the third a gap; one step,
# worth 1. All steps: 1, 0, 1, mean 2/3, n - 1: std .577350, n: std .471405
STEP_REWARDS = torch.tensor([[0, 1.0, 0, 0], [0, 0, 9, 1]])
STEP_ENDS = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)
STEP_MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1]], dtype=torch.bool)


@pytest.mark.parametrize(("group_std", "std"), [("none", 1.0), ("sample", 0.577350), ("population", 0.471405)])
def test_process_relative(group_std: str, std: float) -> None:
    found = process_relative(STEP_REWARDS, STEP_ENDS, STEP_MASK, torch.zeros(2), bools(1, 1), group_std=group_std)
    # normalised, times std: 1/3, -2/3 | 1/3; the first two tokens of row 0 see both steps
    expected = np.array([[-1, -1, -2, -2], [1, 1, 0, 1]]) / 3 / std
    assert np.allclose(found, expected, atol=1e-5)


def test_a_step_is_worth_what_its_tokens_earned() -> None:
    # steps worth 1 - .25 = .75 and 0 - .25 = -.25: mean .25, so +.5 and -.5
    rewards, ends = torch.tensor([[-0.25, 1, -0.25, 0]]), torch.tensor([[0, 1, 0, 1]], dtype=torch.bool)
    found = process_relative(rewards, ends, torch.ones_like(ends), torch.zeros(1), bools(1), group_std="none")
    assert np.allclose(found, [[0, 0, -0.5, -0.5]], atol=1e-6)


def test_process_relative_with_one_step_per_response_is_group_relative() -> None:
    rewards, ends = torch.tensor([[0, 1.0], [0, 0], [0, 0]]), torch.tensor([[0, 1]] * 3, dtype=torch.bool)
    found = process_relative(rewards, ends, torch.ones_like(ends), torch.zeros(3), bools(1, 1, 1), group_std="none")
    assert np.allclose(found, [[2 / 3] * 2, [-1 / 3] * 2, [-1 / 3] * 2], atol=1e-6)


def test_process_relative_keeps_groups_and_unscored_rows_apart() -> None:
    rewards = torch.tensor([[1.0], [7], [0], [5], [math.nan]])
    ends, scored = torch.ones(5, 1, dtype=torch.bool), bools(1, 1, 1, 1, 0)
    found = process_relative(rewards, ends, ends, torch.tensor([3, 1, 3, 1, 3]), scored, group_std="none")
    assert found.squeeze(1).tolist() == [0.5, 1, -0.5, -1, 0]


def test_process_relative_without_a_step_is_zero() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    found = process_relative(torch.ones(2, 3), nothing, ~nothing, torch.zeros(2), bools(1, 1), group_std="sample")
    assert not found.any()


def test_rewards_to_go() -> None:
    # by hand, the third token a gap: 4; 2 + .5 x 4 = 4; 1 + .5 x 4 = 3
    rewards, mask = torch.tensor([[1, 2, math.nan, 4.0]]), torch.tensor([[1, 1, 0, 1]], dtype=torch.bool)
    assert rewards_to_go(rewards, mask, gamma=0.5).tolist() == [[3, 4, 0, 4]]
    assert rewards_to_go(rewards, mask, gamma=1.0).tolist() == [[7, 6, 0, 4]]
    assert rewards_to_go(rewards, mask, gamma=0.0).tolist() == [[1, 2, 0, 4]]


def test_length_adaptive_lambda() -> None:
    mask = torch.zeros(4, 12, dtype=torch.bool)
    mask[0, 2:12], mask[1, 0], mask[2, 1:12:2] = True, True, True  # 10 tokens, 1 token, 6 with gaps, none
    # 1 - 1 / (.5 x 10) = .8; 1 - 1 / .5 = -1, so 0; 1 - 1 / 3; nothing to weigh
    assert np.allclose(length_adaptive_lambda(mask, 0.5), [0.8, 0, 2 / 3, 0])


def test_gae_takes_a_lambda_for_each_row() -> None:
    # delta = (0, 1) in both rows
    rewards, zeros = torch.tensor([[0, 1.0]] * 2), torch.zeros(2, 2)
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages, _ = gae(rewards, zeros, mask, torch.zeros(2), gamma=1.0, lam=torch.tensor([0.25, 0.75]))
    assert advantages.tolist() == [[0.25, 1], [0.75, 1]]


def test_vapo_has_a_lambda_by_length_for_the_policy_and_its_own_for_the_critic() -> None:
    # values 0, reward 1 at the end. Two tokens: lambda 1 - 1 / (1 x 2) = .5; four: .75. The critic's is 1: returns 1
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
    rewards = torch.tensor([[0, 0, 1.0, 0, 0], [0, 0, 0, 0, 1]])
    inferred = Inferred(torch.zeros(2, 5), None, Values(torch.zeros(2, 5), torch.zeros(2)))
    algo = AlgoConfig(lam=1.0, lam_length_alpha=1.0)
    found, _ = credit(batch_of(mask, rewards), inferred, resolve("vapo", "gae", "clipped_surrogate"), algo)
    assert np.allclose(found.advantages, [[0, 0.5, 1, 0, 0], [0, 0.421875, 0.5625, 0.75, 1]])
    assert found.returns is not None
    assert found.returns.tolist() == [[0, 1, 1, 0, 0], [0, 1, 1, 1, 1]]


def test_reinforce_pp_whitens_what_a_token_and_those_after_it_earn() -> None:
    # score 1 less .1 x (.2, .4): rewards (-.02, .96), to go (.94, .96): mean .95, std .0141421 + 1e-6
    batch = batch_of(torch.tensor([[False, True, True]]), torch.tensor([[0, 0, 1.0]]))
    inferred = Inferred(torch.full((1, 3), -1.0), torch.tensor([[0, -1.2, -1.4]]))
    algorithm = resolve("reinforce_pp", "reinforce_pp", "clipped_surrogate")
    found, _ = credit(batch, inferred, algorithm, AlgoConfig(kl_reward_coef=0.1))
    assert np.allclose(found.advantages, [[0, -0.70706, 0.70706]], atol=2e-5)


def test_reinforce_pp_baseline_whitens_over_tokens_what_its_group_left() -> None:
    # less the group's mean: +.5 on one token, -.5 on three: mean -.25, squares .5625 + 3 x .0625 = .75, std sqrt(.75 / 3)
    mask = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    batch = batch_of(mask, torch.tensor([[0, 1.0, 0, 0], [0, 0, 0, 0]]))
    algorithm = resolve("reinforce_pp_baseline", "reinforce_pp_baseline", "clipped_surrogate")
    found, _ = credit(batch, Inferred(torch.zeros(2, 4)), algorithm, AlgoConfig())
    assert np.allclose(found.advantages, [[0, 1.5, 0, 0], [0, -0.5, -0.5, -0.5]], atol=1e-5)
