"""Advantage estimators, against hand-worked numbers and references written from the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from unit_batches import poison, random_mask

from tandem.platform.algorithms.advantages import gae, group_relative, outcomes

BAD = [math.nan, math.inf, -math.inf, 100.0]


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float32)


def mask_of(*bits: int) -> Tensor:
    return torch.tensor([bits], dtype=torch.bool)


@pytest.mark.parametrize("bad", BAD)
def test_gae_never_reads_padding(bad: float) -> None:
    mask = mask_of(1, 1, 0)
    advantages, returns = gae(row(0, 1, bad), row(0, 0, bad), mask, torch.zeros(1), gamma=1.0, lam=0.95)
    assert torch.allclose(advantages, row(0.95, 1, 0))
    assert torch.allclose(returns, row(0.95, 1, 0))


def test_gae_starts_from_the_final_value_of_a_bootstrapped_row() -> None:
    rewards = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 9.0]])
    values = torch.tensor([[0.5] * 4, [0.2, 0.4, 0.6, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    on, _ = gae(rewards, values, mask, torch.tensor([0, 0.8]), gamma=1.0, lam=0.95)
    off, _ = gae(rewards, values, mask, torch.zeros(2), gamma=1.0, lam=0.95)
    # deltas of row 1 with bootstrap: .2, .2, .2; without: .2, .2, -.6
    assert torch.allclose(on[0], torch.tensor([0.428687, 0.45125, 0.475, 0.5]), atol=1e-6)
    assert torch.allclose(on[1], torch.tensor([0.5705, 0.39, 0.2, 0]), atol=1e-6)
    assert torch.allclose(off[1], torch.tensor([-0.1515, -0.37, -0.6, 0]), atol=1e-6)
    assert torch.equal(on[0], off[0])


def test_gae_with_lambda_one_is_the_return_less_the_value() -> None:
    rewards, values, mask = row(0, 0, 0, 0), row(0.2, 0.4, 0.6, 0), mask_of(1, 1, 1, 0)
    on, returns = gae(rewards, values, mask, torch.tensor([0.8]), gamma=1.0, lam=1.0)
    off, _ = gae(rewards, values, mask, torch.zeros(1), gamma=1.0, lam=1.0)
    assert torch.allclose(on, row(0.6, 0.4, 0.2, 0))
    assert torch.allclose(returns, row(0.8, 0.8, 0.8, 0))
    assert torch.allclose(off, row(-0.2, -0.4, -0.6, 0))


def test_gae_discounts() -> None:
    # By hand: delta_1 = 1 - .2 = .8; delta_0 = 0 + .5 * .2 - .4 = -.3; A_0 = -.3 + .5 * .5 * .8 = -.1
    advantages, returns = gae(row(0, 1), row(0.4, 0.2), mask_of(1, 1), torch.zeros(1), gamma=0.5, lam=0.5)
    assert torch.allclose(advantages, row(-0.1, 0.8))
    assert torch.allclose(returns, row(0.3, 1.0))


def test_gae_with_lambda_zero_is_the_temporal_difference() -> None:
    advantages, _ = gae(row(1, 2, 3), row(4, 5, 6), mask_of(1, 1, 1), torch.tensor([7.0]), gamma=0.5, lam=0.0)
    assert torch.allclose(advantages, row(1 + 2.5 - 4, 2 + 3 - 5, 3 + 3.5 - 6))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 5), width=st.integers(1, 9), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_gae_equals_the_reference_on_the_compressed_sequence(seed: int, rows: int, width: int, gamma: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, _ = random_mask(generator, rows, width)
    rewards, values = torch.randn(2, rows, width, generator=generator)
    final = torch.randn(rows, generator=generator)
    advantages, returns = gae(rewards, values, mask, final, gamma=gamma, lam=0.8)
    for b in range(rows):
        kept = mask[b]
        expected = reference.gae(rewards[b][kept].tolist(), values[b][kept].tolist(), float(final[b]), gamma, 0.8)
        assert torch.allclose(advantages[b][kept], torch.tensor(expected[0], dtype=torch.float32), atol=1e-5)
        assert torch.allclose(returns[b][kept], torch.tensor(expected[1], dtype=torch.float32), atol=1e-5)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_blind_to_poison_width_and_order_of_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, _ = random_mask(generator, 6, 8)
    rewards, values = torch.randn(2, 6, 8, generator=generator)
    final = torch.randn(6, generator=generator)
    plain = gae(rewards, values, mask, final, gamma=0.99, lam=0.9)
    order = torch.randperm(6, generator=generator)
    shuffled = gae(rewards[order], values[order], mask[order], final[order], gamma=0.99, lam=0.9)
    more_rewards, more_values = (torch.cat([x, torch.full((6, 20), math.nan)], dim=1) for x in (rewards, values))
    more_mask = torch.cat([mask, torch.zeros(6, 20, dtype=torch.bool)], dim=1)
    wider = gae(more_rewards, more_values, more_mask, final, gamma=0.99, lam=0.9)
    for n in range(2):
        assert torch.equal(shuffled[n], plain[n][order])
        assert torch.equal(wider[n][:, :8], plain[n])
    for bad in BAD:
        poisoned = gae(poison(rewards, mask, bad), poison(values, mask, bad), mask, final, gamma=0.99, lam=0.9)
        assert torch.equal(poisoned[0], plain[0])
        assert torch.equal(poisoned[1], plain[1])


def test_gae_of_an_empty_response_is_zero() -> None:
    advantages, returns = gae(row(9, 9), row(9, 9), mask_of(0, 0), torch.tensor([5.0]), gamma=1.0, lam=1.0)
    assert torch.equal(advantages, row(0, 0))
    assert torch.equal(returns, row(0, 0))


def test_gae_refuses_shapes_that_differ() -> None:
    with pytest.raises(AssertionError, match="differ in shape"):
        gae(row(1, 2), row(1), mask_of(1, 1), torch.zeros(1), gamma=1.0, lam=1.0)
    with pytest.raises(AssertionError, match="final_values"):
        gae(row(1, 2), row(1, 2), mask_of(1, 1), torch.zeros(2), gamma=1.0, lam=1.0)


def test_outcomes_read_rewards_under_the_mask_of_now() -> None:
    rewards = torch.tensor([[0, 1.0], [0, 0]])
    scores = outcomes(rewards, torch.tensor([[1, 0], [1, 1]], dtype=torch.bool))
    assert scores.tolist() == [0, 0]
    assert relative(scores.tolist()).tolist() == [0, 0]


def test_outcome_of_an_empty_response_is_zero_whatever_stands_in_its_padding() -> None:
    rewards = torch.tensor([[0, 0, 10.0], [0, 0, 0]])
    scores = outcomes(rewards, torch.tensor([[0, 0, 0], [1, 1, 1]], dtype=torch.bool))
    assert scores.tolist() == [0, 0]
    assert relative(scores.tolist()).tolist() == [0, 0]


def test_outcomes_skip_gaps_and_nan() -> None:
    rewards = row(math.nan, 1, 7, 2, math.nan)
    assert outcomes(rewards, mask_of(0, 1, 0, 1, 0)).tolist() == [3]


def relative(
    rewards: list[float], groups: list[int] | None = None, scored: list[bool] | None = None, group_std: str = "sample"
) -> Tensor:
    ids = torch.tensor(groups if groups is not None else [0] * len(rewards))
    known = torch.tensor(scored if scored is not None else [True] * len(rewards))
    return group_relative(torch.tensor(rewards, dtype=torch.float32), ids, known, group_std=group_std)


@pytest.mark.parametrize(
    ("group_std", "expected"),
    [
        # mean .25; sample std .5, population std .4330127
        ("sample", [1.499997, -0.499999, -0.499999, -0.499999]),
        ("population", [1.732047, -0.577349, -0.577349, -0.577349]),
        ("none", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_group_std(group_std: str, expected: list[float]) -> None:
    assert np.allclose(relative([1, 0, 0, 0], group_std=group_std), expected, atol=1e-6)
    if group_std == "none":
        assert relative([1, 0, 0, 0], group_std="none").tolist() == expected  # exactly: nothing is added to 1


def test_group_std_of_the_worked_example() -> None:
    # mean .375, population std .484123 + 1e-6
    advantages = relative([1, 1, 0, 0, 0, 1, 0, 0], group_std="population")
    assert np.allclose(advantages, [1.290992, 1.290992, *[-0.774595] * 3, 1.290992, *[-0.774595] * 2], atol=1e-6)


def test_group_advantages_do_not_depend_on_the_scale_of_rewards_beyond_eps() -> None:
    small = relative([1e-3, 0.0])
    # std = 1e-3 / sqrt(2) = 7.0711e-4, so eps outside the root takes 1 / (1 + 1e-6 / 7.0711e-4) = .998588
    assert np.allclose(small, [0.70711 * 0.998588, -0.70711 * 0.998588], atol=1e-5)


@pytest.mark.parametrize("reward", [0.35, 0.1, 0.3, 0.7, 0.95, 1 / 3, 1.0, 0.5, -1e6])
@pytest.mark.parametrize("group_std", ["sample", "population", "none"])
def test_constant_group_is_exactly_zero(reward: float, group_std: str) -> None:
    assert relative([reward] * 8, group_std=group_std).tolist() == [0.0] * 8


def test_nearly_constant_group_is_computed_without_cancellation() -> None:
    # [0] + 7 x .95: mean .83125, deviations -.83125 and .11875
    assert np.allclose(relative([0, *[0.95] * 7], group_std="none"), [-0.83125, *[0.11875] * 7], atol=1e-6)


def test_groups_follow_ids_not_positions() -> None:
    assert np.allclose(relative([1, 1, 0, 0], [7, 3, 7, 3]), [0.7071, 0.7071, -0.7071, -0.7071], atol=1e-4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("group_std", ["sample", "population", "none"])
def test_group_advantages_permute_with_their_rows(seed: int, group_std: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, ids = torch.randn(12, generator=generator), torch.arange(12) // 3 * 1_000_003
    scored = torch.rand(12, generator=generator) < 0.8
    order = torch.randperm(12, generator=generator)
    plain = group_relative(scores, ids, scored, group_std=group_std)
    moved = group_relative(scores[order], ids[order], scored[order], group_std=group_std)
    assert torch.allclose(moved, plain[order], atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(st.one_of(st.none(), st.floats(-10, 10, width=32)), min_size=1, max_size=5), max_size=4),
    group_std=st.sampled_from(["sample", "population", "none"]),
)
def test_group_advantages_equal_the_reference(groups: list[list[float | None]], group_std: str) -> None:
    flat = [(number, reward) for number, group in enumerate(groups) for reward in group]
    rewards = [0.0 if reward is None else reward for _, reward in flat]
    found = relative(rewards, [number for number, _ in flat], [reward is not None for _, reward in flat], group_std)
    expected: list[float] = []
    for group in groups:
        known = np.array([reward for reward in group if reward is not None], dtype=np.float64)
        mean = known.mean() if len(known) else 0.0
        silent = len(set(known.tolist())) < 2
        std = 1.0 if group_std == "none" or silent else known.std(ddof=int(group_std == "sample")) + 1e-6
        expected += [0.0 if reward is None or silent else (reward - mean) / std for reward in group]
    assert np.allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_unscored_sample_is_left_out_of_the_baseline() -> None:
    scored = [True, False, True, True]
    assert np.allclose(relative([1, 0, 0, 1], scored=scored), [0.57735, 0, -1.1547, 0.57735], atol=1e-5)


def test_unscored_nan_does_not_spread() -> None:
    scored = [True, False, True, True]
    assert np.allclose(relative([1, math.nan, 0, 1], scored=scored), [0.57735, 0, -1.1547, 0.57735], atol=1e-5)


@pytest.mark.parametrize("scored", [[False, False, False, True], [False] * 4])
def test_group_of_one_or_none_scored_is_zero(scored: list[bool]) -> None:
    assert relative([0, 0, 0, 1], scored=scored).tolist() == [0] * 4


@pytest.mark.parametrize("group_std", ["sample", "population", "none"])
def test_group_of_one_is_zero_and_not_nan(group_std: str) -> None:
    assert relative([1.0], group_std=group_std).tolist() == [0.0]


def test_unknown_group_std_is_not_guessed() -> None:
    with pytest.raises(KeyError):
        relative([1, 0], group_std="smaple")


def test_group_relative_refuses_shapes_that_differ() -> None:
    with pytest.raises(AssertionError, match="differ in shape"):
        group_relative(torch.zeros(2), torch.zeros(3), torch.ones(2, dtype=torch.bool), group_std="sample")
