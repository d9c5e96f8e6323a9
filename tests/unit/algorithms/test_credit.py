"""From scored samples to training batches: KL penalty, both estimators, whitening, mini-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from unit_batches import batch_of, make_rollout, poison, random_mask, scores

from tandem.platform.algorithms.credit import credit, epochs, penalised_rewards
from tandem.platform.algorithms.registry import resolve
from tandem.platform.config.algo import AlgoConfig
from tandem.platform.experience.batch import Inferred, RolloutBatch, StopReason, TrainBatch, Values

PPO, GRPO = resolve("ppo", "gae", "clipped_surrogate"), resolve("grpo", "grpo", "clipped_surrogate")


def two_tokens() -> tuple[RolloutBatch, Inferred]:
    """One prompt token, two response tokens, score 1 on the last, log-ratios .2 and .4 to the reference."""
    batch = batch_of(torch.tensor([[False, True, True]]), torch.tensor([[0.0, 0, 1]]))
    old, ref = torch.tensor([[5.0, -1.0, -1.0]]), torch.tensor([[0.0, -1.2, -1.4]])
    return batch, Inferred(old, ref)


@pytest.mark.parametrize("loss_coef", [0.0, 0.1])
def test_kl_in_the_reward_is_on_only_by_its_own_coefficient(loss_coef: float) -> None:
    batch, inferred = two_tokens()
    on = penalised_rewards(batch, inferred, AlgoConfig(kl_loss_coef=loss_coef), 0.1)
    off = penalised_rewards(batch, inferred, AlgoConfig(kl_loss_coef=loss_coef), 0.0)
    assert np.allclose(on.token_rewards, [[0, -0.02, 0.96]])
    assert off is batch


def test_kl_in_the_reward_uses_its_own_estimator() -> None:
    batch, inferred = two_tokens()
    algo = AlgoConfig(kl_reward_estimator="k2", kl_loss_estimator="k3")
    assert np.allclose(penalised_rewards(batch, inferred, algo, 1.0).token_rewards, [[0, -0.02, 1 - 0.08]])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_kl_outside_the_mask_is_not_read(bad: float) -> None:
    batch, inferred = two_tokens()
    assert inferred.ref_logprobs is not None
    poisoned = replace(inferred, ref_logprobs=poison(inferred.ref_logprobs, batch.response_mask, bad))
    assert np.allclose(penalised_rewards(batch, poisoned, AlgoConfig(), 0.1).token_rewards, [[0, -0.02, 0.96]])


def test_kl_in_the_reward_needs_a_reference() -> None:
    batch, inferred = two_tokens()
    with pytest.raises(AssertionError, match="needs reference log-probs"):
        penalised_rewards(batch, replace(inferred, ref_logprobs=None), AlgoConfig(), 0.1)


def test_gae_credits_a_rollout() -> None:
    # One token answered of two: r = (0, 1), V = (.5, .25), lambda .5: delta = (-.25, .75), A = (.125, .75)
    batch = RolloutBatch.from_rollouts([make_rollout()], scores(1.0))
    values = Values(torch.tensor([[9.0, 9, 0.5, 0.25]]), torch.tensor([7.0]))
    found, _ = credit(batch, Inferred(torch.zeros(1, 4), None, values), PPO, AlgoConfig(lam=0.5))
    assert found.returns is not None
    assert np.allclose(found.advantages, [[0, 0, 0.125, 0.75]])
    assert np.allclose(found.returns, [[0, 0, 0.625, 1.0]])
    assert found.old_values is values.values


@pytest.mark.parametrize("bootstrap", [False, True])
def test_bootstrap_follows_the_stop_reason_and_not_the_width(bootstrap: bool) -> None:
    rollouts = [
        make_rollout(response=(5, 5, 5, 5), stop=StopReason.STOP),
        make_rollout(response=(5, 5, 5), stop=StopReason.LENGTH),
    ]
    batch = RolloutBatch.from_rollouts(rollouts, scores(1.0, 0.0))
    values = Values(torch.tensor([[9, 9, 0.5, 0.5, 0.5, 0.5], [9, 9, 0.2, 0.4, 0.6, 9]]), torch.tensor([math.nan, 0.8]))
    algo = AlgoConfig(lam=0.95, bootstrap_truncated=bootstrap)
    found = credit(batch, Inferred(torch.zeros(2, 6), None, values), PPO, algo)[0].advantages[:, 2:]
    cut = [0.5705, 0.39, 0.2, 0] if bootstrap else [-0.1515, -0.37, -0.6, 0]
    assert np.allclose(found, [[0.428687, 0.45125, 0.475, 0.5], cut], atol=1e-6)


def test_group_relative_credit_is_the_same_on_every_written_token() -> None:
    rollouts = [
        make_rollout(response=(5, 6, 7), mask=(True, False, True), group=4),
        make_rollout(response=(5,), group=9),
        make_rollout(response=(5,), group=4),
        make_rollout(response=(5, 5), group=9),
    ]
    batch = RolloutBatch.from_rollouts(rollouts, scores(1, 1, 0, 0))
    found, _ = credit(batch, Inferred(torch.zeros(4, 5)), GRPO, AlgoConfig(group_std="none"))
    expected = [[0, 0, 0.5, 0, 0.5], [0, 0, 0.5, 0, 0], [0, 0, -0.5, 0, 0], [0, 0, -0.5, -0.5, 0]]
    assert found.advantages.tolist() == expected
    assert found.returns is None
    assert found.old_values is None


def test_unscorable_sample_trains_nothing_and_leaves_its_siblings_alone() -> None:
    rollouts = [make_rollout() for _ in range(4)]
    batch = RolloutBatch.from_rollouts(rollouts, scores(1, None, 0, 1))
    found, _ = credit(batch, Inferred(torch.zeros(4, 4)), GRPO, AlgoConfig())
    assert np.allclose(found.advantages[:, 3], [0.57735, 0, -1.1547, 0.57735], atol=1e-5)
    assert found.as_minibatch().num_sequences == 3
    assert found.as_minibatch().num_tokens == 6


def test_empty_response_keeps_its_place_in_the_group_with_outcome_zero() -> None:
    batch = RolloutBatch.from_rollouts([make_rollout(response=()), make_rollout()], scores(10.0, 1.0))
    found, _ = credit(batch, Inferred(torch.zeros(2, 4)), GRPO, AlgoConfig(group_std="none"))
    assert found.advantages.tolist() == [[0, 0, 0, 0], [0, 0, 0.5, 0.5]]
    assert (found.as_minibatch().num_tokens, found.as_minibatch().num_sequences) == (2, 1)


def test_whitening_is_over_the_tokens_of_the_mask() -> None:
    batch = batch_of(torch.tensor([[0, 1, 1, 0]], dtype=torch.bool), torch.tensor([[0, 0, 1.0, 0]]))
    values = Values(torch.tensor([[math.nan, 0, 0, math.nan]]), torch.zeros(1))
    algo = AlgoConfig(lam=0.95, whiten_advantages=True)
    found, _ = credit(batch, Inferred(torch.zeros(1, 4), None, values), PPO, algo)
    assert np.allclose(found.advantages, [[0, -0.7071, 0.7071, 0]], atol=1e-4)
    assert found.returns is not None
    assert np.allclose(found.returns, [[0, 0.95, 1, 0]])  # the critic's targets are not whitened


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
@pytest.mark.parametrize("seed", range(4))
def test_gaps_are_as_if_they_were_not_there(estimator: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, lengths = random_mask(generator, 6, 9)
    rewards, values, old, ref = torch.randn(4, 6, 9, generator=generator)
    final, groups = torch.randn(6, generator=generator), torch.tensor([0, 1, 2, 2, 1, 0])
    algo = AlgoConfig(gamma=0.9, lam=0.8, kl_reward_coef=0.1, bootstrap_truncated=True)
    truncated = torch.tensor([1, 0, 1, 0, 1, 0], dtype=torch.bool)
    algorithm = resolve("x", estimator, "clipped_surrogate")
    batch = batch_of(mask, rewards, lengths=lengths, group_ids=groups, truncated=truncated)
    whole, _ = credit(batch, Inferred(old, ref, Values(values, final)), algorithm, algo)

    # The same rows with only their own tokens, left-aligned.
    order = torch.argsort(~mask, dim=1, stable=True)
    squeezed = batch_of(mask.gather(1, order), rewards.gather(1, order), group_ids=groups, truncated=truncated)
    inferred = Inferred(old.gather(1, order), ref.gather(1, order), Values(values.gather(1, order), final))
    compressed, _ = credit(squeezed, inferred, algorithm, algo)
    assert torch.allclose(whole.advantages.gather(1, order), compressed.advantages, atol=1e-6)
    if whole.returns is not None and compressed.returns is not None:
        assert torch.allclose(whole.returns.gather(1, order), compressed.returns, atol=1e-6)
    assert not whole.advantages[~mask].any()


def train_batch(rows: int) -> TrainBatch:
    """Row n has its number as old log-prob, and n % 3 response tokens."""
    mask = torch.zeros(rows, 3, dtype=torch.bool)
    for row in range(rows):
        mask[row, 1 : 1 + row % 3] = True
    return TrainBatch(batch_of(mask), torch.arange(rows * 1.0)[:, None].expand(rows, 3), torch.zeros(rows, 3))


def test_every_epoch_uses_each_row_once_in_a_new_order() -> None:
    found = list(epochs(train_batch(12), count=2, minibatches=3, seed=5))
    assert [[len(part) for part in parts] for parts in found] == [[4] * 3] * 2
    orders = [[int(x) for part in parts for x in part.old_logprobs[:, 0]] for parts in found]
    assert [sorted(order) for order in orders] == [list(range(12))] * 2
    assert orders[0] != orders[1]
    assert orders[0] != list(range(12))


def test_mini_batches_follow_from_the_seed() -> None:
    def order(seed: int) -> list[float]:
        (parts,) = epochs(train_batch(12), 1, 2, seed)
        return [x for part in parts for x in part.old_logprobs[:, 0].tolist()]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_mini_batches_carry_their_own_denominators() -> None:
    for parts in epochs(train_batch(9), 1, 3, seed=0):
        assert len(parts) == 3
        for part in parts:
            rows = part.old_logprobs[:, 0].long()
            assert part.num_tokens == int((rows % 3).sum())
            assert part.num_sequences == int((rows % 3 > 0).sum())


def test_a_mini_batch_without_a_token_is_left_out() -> None:
    for seed in range(10):  # row 0 of 3 has no token
        (parts,) = epochs(train_batch(3), 1, 3, seed)
        assert sorted(part.num_tokens for part in parts) == [1, 2]


def test_a_coefficient_given_goes_before_the_configured_one() -> None:
    batch, inferred = two_tokens()
    algo, plain = AlgoConfig(kl_reward_coef=0.1), resolve("x", "reinforce_pp", "policy_gradient")
    configured, metrics = credit(batch, inferred, plain, replace(algo, whiten_advantages=False))
    steered, steered_metrics = credit(batch, inferred, plain, algo, 0.5)
    assert (metrics["kl/coef"], steered_metrics["kl/coef"]) == (0.1, 0.5)
    # k1 of .2 and .4, before the penalty
    assert metrics["kl/sampled"] == pytest.approx(0.3)
    assert configured.advantages.isfinite().all()
    unpenalised, _ = credit(batch, inferred, plain, algo, 0.0)
    assert unpenalised.advantages.tolist() == [[0, 0, 0]]  # both tokens earn 1: no deviation
    assert steered.advantages[0, 1] < 0 < steered.advantages[0, 2]


def test_the_kl_at_sampling_is_that_of_all_samples_masked_or_not() -> None:
    batch, inferred = two_tokens()
    cut = replace(batch, truncated=torch.tensor([True]))
    found, metrics = credit(cut, inferred, GRPO, AlgoConfig(kl_reward_coef=0.1, overlong_filter=True))
    assert not found.mask.any()
    assert metrics["kl/sampled"] == pytest.approx(0.3)


def test_without_a_sampled_token_there_is_no_kl() -> None:
    batch, inferred = two_tokens()
    unscored = replace(batch, response_mask=torch.zeros_like(batch.response_mask), scored=torch.tensor([False]))
    _, metrics = credit(unscored, inferred, GRPO, AlgoConfig(kl_reward_coef=0.1))
    assert metrics == {"kl/coef": 0.1}


def test_right_answers_are_those_whose_reward_before_shaping_is_above_the_bar() -> None:
    batch = batch_of(
        torch.ones(4, 2, dtype=torch.bool),
        accuracies=torch.tensor([1.0, 0.5, 0.0, 1.0]),
        rewards=torch.tensor([-9.0, 9, 9, 9]),
        scored=torch.tensor([True, True, True, False]),
    )
    inferred = Inferred(torch.zeros(4, 2))
    found, _ = credit(batch, inferred, GRPO, AlgoConfig(positive_nll_coef=0.1, positive_above=0.5))
    assert found.positive is not None
    assert found.positive.tolist() == [True, False, False, False]
    assert found.as_minibatch().num_positive_tokens == 2
    assert credit(batch, inferred, GRPO, AlgoConfig())[0].positive is None


def test_a_truncated_response_counts_in_the_baseline_and_in_no_loss_when_filtered() -> None:
    rollouts = [make_rollout(stop=StopReason.LENGTH), make_rollout(), make_rollout()]
    batch = RolloutBatch.from_rollouts(rollouts, scores(3.0, 0.0, 0.0))
    for filtered, first in ((False, 2.0), (True, 0.0)):
        algo = AlgoConfig(group_std="none", overlong_filter=filtered)
        found, _ = credit(batch, Inferred(torch.zeros(3, 4)), GRPO, algo)
        assert found.advantages[:, 3].tolist() == [first, -1, -1]
        assert found.as_minibatch().num_tokens == (4 if filtered else 6)
