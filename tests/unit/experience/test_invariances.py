"""Invariances of advantages: padding, order, duplicates, neighbours, gaps; and cases with an advantage of exactly 0."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algo_cases import BAD, ROWS, SETTINGS, VARIANTS, WIDTH, Case, random_case, widened
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from unit_batches import batch_of, make_rollout

from tandem.platform.algorithms.credit import credit, penalised_rewards
from tandem.platform.algorithms.registry import ESTIMATORS, resolve
from tandem.platform.config.algo import AlgoConfig
from tandem.platform.experience.batch import Inferred, Rollout, RolloutBatch, Score, Values

SEEDS = st.integers(0, 10_000)
GROUPED = [name for name, estimator in ESTIMATORS.items() if estimator.min_group > 1]
some_examples = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
everything = pytest.mark.parametrize(("name", "variant"), VARIANTS)


def settings_of(name: str, variant: int) -> AlgoConfig:
    return replace(SETTINGS[name][variant], kl_reward_coef=0.1, correction="truncate")


def credited(case: Case, name: str, algo: AlgoConfig) -> tuple[Tensor, Tensor]:
    """(advantages, returns, or zeros if there are no returns)."""
    found, _ = credit(case.batch, case.inferred, resolve("x", name, "clipped_surrogate"), algo)
    return found.advantages, torch.zeros_like(found.advantages) if found.returns is None else found.returns


def estimated(case: Case, name: str, algo: AlgoConfig) -> Tensor:
    """Advantages before any whitening over the batch."""
    batch = penalised_rewards(case.batch, case.inferred, algo, algo.kl_reward_coef)
    return ESTIMATORS[name].advantages(batch, case.inferred.values, algo).advantages


@everything
@given(seed=SEEDS)
@some_examples
def test_what_stands_outside_the_mask_changes_nothing(name: str, variant: int, seed: int) -> None:
    algo = settings_of(name, variant)
    plain = credited(random_case(seed, 0.0), name, algo)
    assert all(part.isfinite().all() for part in plain)
    for bad in BAD:
        found = credited(random_case(seed, bad), name, algo)
        assert torch.equal(found[0], plain[0])
        assert torch.equal(found[1], plain[1])


@everything
@pytest.mark.parametrize("filler", [0.0, math.nan, math.inf])
def test_twenty_more_columns_of_padding_change_nothing(name: str, variant: int, filler: float) -> None:
    algo = settings_of(name, variant)
    for seed in range(4):
        case = random_case(seed)
        plain, wide = credited(case, name, algo), credited(widened(case, 20, filler), name, algo)
        for n in range(2):
            assert wide[n].shape == (ROWS, WIDTH + 20)
            assert torch.allclose(wide[n][:, :WIDTH], plain[n], atol=1e-6)
            assert not wide[n][:, WIDTH:].any()


@everything
@given(seed=SEEDS)
@some_examples
def test_rows_in_another_order_give_the_same_in_that_order(name: str, variant: int, seed: int) -> None:
    algo, case = settings_of(name, variant), random_case(seed)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    plain, moved = credited(case, name, algo), credited(case.select(order), name, algo)
    assert torch.allclose(moved[0], plain[0][order], atol=1e-5)
    assert torch.allclose(moved[1], plain[1][order], atol=1e-5)


def squeezed(case: Case) -> tuple[Case, Tensor]:
    """(the rows with only the policy's own tokens, left-aligned; the original positions of these tokens)."""
    order = torch.argsort(~case.batch.response_mask, dim=1, stable=True)
    batch, inferred = case.batch, case.inferred
    assert inferred.values is not None
    assert inferred.ref_logprobs is not None
    names = ("response_mask", "token_rewards", "step_ends", "rollout_logprobs")
    columns = {name: getattr(batch, name).gather(1, order) for name in names}
    values = Values(inferred.values.values.gather(1, order), inferred.values.final)
    parts = (inferred.old_logprobs.gather(1, order), inferred.ref_logprobs.gather(1, order), values)
    return Case(replace(batch, **columns), Inferred(*parts)), order


@everything
@given(seed=SEEDS)
@some_examples
def test_gaps_are_as_if_they_were_not_there(name: str, variant: int, seed: int) -> None:
    algo, case = settings_of(name, variant), random_case(seed)
    compressed, order = squeezed(case)
    for whole, short in zip(credited(case, name, algo), credited(compressed, name, algo), strict=True):
        assert torch.allclose(whole.gather(1, order), short, atol=1e-5)
        assert not whole[~case.batch.response_mask].any()


@everything
@given(seed=SEEDS)
@some_examples
def test_rows_that_were_not_scored_are_as_if_they_were_not_there(name: str, variant: int, seed: int) -> None:
    algo, case = settings_of(name, variant), random_case(seed)
    scored = case.batch.scored.nonzero().squeeze(1)
    for whole, without in zip(credited(case, name, algo), credited(case.select(scored), name, algo), strict=True):
        assert torch.allclose(whole[scored], without, atol=1e-5)
        assert not whole[~case.batch.scored].any()


@everything
@given(seed=SEEDS)
@some_examples
def test_a_second_copy_of_the_batch_under_other_ids_changes_nothing(name: str, variant: int, seed: int) -> None:
    algo, case = settings_of(name, variant), random_case(seed)
    twice = case.select([*range(ROWS), *range(ROWS)])
    shift = torch.tensor([0] * ROWS + [1000] * ROWS)
    twice = Case(replace(twice.batch, group_ids=twice.batch.group_ids + shift), twice.inferred)
    plain, found = estimated(case, name, algo), estimated(twice, name, algo)
    assert torch.allclose(found[:ROWS], plain, atol=1e-5)
    assert torch.equal(found[ROWS:], found[:ROWS])


@everything
def test_equal_rows_of_a_group_get_equal_advantages(name: str, variant: int) -> None:
    algo = settings_of(name, variant)
    for seed in range(4):
        found, _ = credited(random_case(seed).select([*range(ROWS), 0, 1, 5]), name, algo)
        assert torch.equal(found[ROWS:], found[[0, 1, 5]])


def from_scores(rollouts: list[Rollout], rewards: list[float | None]) -> Case:
    """Rollouts with these rewards, a greedy baseline of 0, and values and log-probs of 0."""
    batch = RolloutBatch.from_rollouts(rollouts, [Score(reward) for reward in rewards], [0.0] * len(rollouts))
    shape = tuple(batch.tokens.shape)
    zeros = torch.zeros(shape)
    return Case(batch, Inferred(zeros, zeros, Values(zeros, torch.zeros(shape[0]))))


@pytest.mark.parametrize("name", GROUPED)
def test_two_groups_of_the_same_prompt_do_not_mix(name: str) -> None:
    rollouts = [make_rollout(group=group) for group in (3, 8, 3, 8)]
    assert rollouts[0].prompt.text == rollouts[1].prompt.text
    plain = estimated(from_scores(rollouts, [1, 0, 0, 1]), name, AlgoConfig())
    other = estimated(from_scores(rollouts, [1, 50, 0, -7]), name, AlgoConfig())
    assert torch.equal(other[[0, 2]], plain[[0, 2]])
    assert not torch.equal(other[[1, 3]], plain[[1, 3]])
    constant = estimated(from_scores(rollouts, [1, 0, 1, 0]), name, AlgoConfig())
    assert not constant.any()


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.35, 0.7, 0.95, 1 / 3, 1.0, -1e6, 0.0])
@pytest.mark.parametrize("name", [*GROUPED, "reinforce"])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_a_group_of_one_reward_is_exactly_zero(name: str, size: int, reward: float) -> None:
    rollouts = [make_rollout(response=[5] * (1 + row % 4)) for row in range(size)]
    for group_std in ("sample", "population", "none"):
        found, _ = credited(from_scores(rollouts, [reward] * size), name, AlgoConfig(group_std=group_std))
        assert not found.any()


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("rewards", [[1.0], [None, 1.0], [None, None, 5.0, None], [None]])
def test_a_group_cut_to_one_or_none_is_zero(name: str, rewards: list[float | None]) -> None:
    found, _ = credited(from_scores([make_rollout() for _ in rewards], rewards), name, AlgoConfig())
    assert not found.any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp_baseline"])
def test_an_empty_response_counts_as_zero_in_the_baseline_of_the_others(name: str) -> None:
    lone = from_scores([make_rollout(response=()), make_rollout()], [10.0, 1.0])
    named = from_scores([make_rollout(), make_rollout()], [0.0, 1.0])
    assert not estimated(lone, name, AlgoConfig())[0].any()
    assert torch.equal(estimated(lone, name, AlgoConfig())[1], estimated(named, name, AlgoConfig())[1])
    assert estimated(lone, name, AlgoConfig())[1, 2:].all()


def test_an_empty_response_weighs_nothing_in_the_length_weighted_baseline() -> None:
    # baseline = (0 x 0 + 2 x 1) / (0 + 2) = 1
    assert not estimated(from_scores([make_rollout(response=()), make_rollout()], [10.0, 1.0]), "opo", AlgoConfig()).any()


def test_an_empty_response_has_no_step_among_those_of_its_group() -> None:
    case = from_scores([make_rollout(response=()), make_rollout(), make_rollout()], [10.0, 1.0, 0.0])
    # steps worth 1 and 0: mean .5
    found = estimated(case, "grpo_process", AlgoConfig(group_std="none"))
    assert found.tolist() == [[0] * 4, [0, 0, 0.5, 0.5], [0, 0, -0.5, -0.5]]


@everything
def test_a_batch_without_a_token_is_all_zeros(name: str, variant: int) -> None:
    algo, case = settings_of(name, variant), random_case(0)
    nothing = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    silent = Case(replace(case.batch, response_mask=nothing, step_ends=nothing), case.inferred)
    for part in credited(silent, name, algo):
        assert not part.any()  # NaN would count as true


@everything
def test_muted_rows_count_in_the_baseline_and_not_in_the_losses(name: str, variant: int) -> None:
    algo = settings_of(name, variant)
    for seed in range(4):
        case = random_case(seed)
        heard = Case(replace(case.batch, muted=torch.zeros(ROWS, dtype=torch.bool)), case.inferred)
        muted = Case(replace(case.batch, muted=torch.tensor([True] + [False] * (ROWS - 1))), case.inferred)
        found, _ = credited(muted, name, algo)
        assert not found[0].any()
        if not (ESTIMATORS[name].whitens or algo.whiten_advantages):
            assert torch.equal(found[1:], credited(heard, name, algo)[0][1:])


def test_the_position_of_a_group_in_the_batch_does_not_matter() -> None:
    # ids a, b, a, b with rewards 1, 1, 0, 0: by position both groups would be constant
    mask = torch.tensor([[False, True]] * 4)
    batch = batch_of(mask, torch.tensor([[0, 1.0], [0, 1], [0, 0], [0, 0]]), group_ids=torch.tensor([9, 2, 9, 2]))
    expected = {"grpo": 0.7071, "dr_grpo": 0.5, "rloo": 1.0, "opo": 0.5}
    for name, advantage in expected.items():
        found = estimated(Case(batch, Inferred(torch.zeros(4, 2))), name, AlgoConfig())[:, 1]
        assert torch.allclose(found, torch.tensor([advantage, advantage, -advantage, -advantage]), atol=1e-4)
