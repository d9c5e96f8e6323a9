"""Flat metrics computed from the data of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from unit_batches import batch_of, make_rollout, poison, scores

from tandem.platform.experience.batch import RolloutBatch, Score, StopReason, TrainBatch
from tandem.platform.loop.collector import Collected
from tandem.platform.loop.group import Group
from tandem.platform.loop.metrics import (
    add_totals,
    credit_metrics,
    explained_variance,
    memory_metrics,
    policy_lag_metrics,
    reduce_totals,
    reward_metrics,
    rollout_metrics,
    sample_metrics,
)
from tandem.platform.loop.protocols import Totals


def test_totals_add_up_before_they_are_divided() -> None:
    parts = [
        Totals({"loss": (4.0, 1.0), "kl": (1.0, 2.0)}, {"ratio": 2.0}),
        Totals({"loss": (9.0, 9.0)}, {"ratio": 1.5, "norm": -1.0}),
    ]
    assert add_totals(parts) == Totals({"loss": (13.0, 10.0), "kl": (1.0, 2.0)}, {"ratio": 2.0, "norm": -1.0})
    assert reduce_totals(parts) == {"loss": 1.3, "kl": 0.5, "ratio": 2.0, "norm": -1.0}


def test_a_mean_of_nothing_is_left_out() -> None:
    assert reduce_totals([Totals({"loss": (0.0, 0.0), "kl": (1.0, 2.0)}, {})]) == {"kl": 0.5}
    assert reduce_totals([]) == {}


def test_rewards() -> None:
    found = reward_metrics(
        [
            Score(1.0, {"exact_match": 1.0, "length": -0.5}),
            Score(0.0, {"exact_match": 0.0, "length": 0.5}),
            Score(None, {"exact_match": None, "length": 1.5}, "timeout"),
            Score(None, {}, "timeout"),
            Score(0.5, {"exact_match": 0.5}),
        ]
    )
    assert found == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(math.sqrt(0.5 / 3)),
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/unscorable": 2.0,
        "reward/unscorable_timeout": 2.0,
        "reward/exact_match": 0.5,
        "reward/length": 0.5,
    }


def test_rewards_of_nothing_scorable() -> None:
    found = reward_metrics([Score(None, {"exact_match": None}, "nan")])
    assert found == {"reward/unscorable": 1.0, "reward/unscorable_nan": 1.0}


def test_one_reward_has_no_spread() -> None:
    assert reward_metrics([Score(2.0)])["reward/std"] == 0.0


def group(*rewards: float | None, baseline: float | None = None) -> Group:
    own = scores(*rewards)
    return Group([make_rollout() for _ in own], own, baseline, greedy_tokens=0 if baseline is None else 3)


def collected(groups: list[Group], sampled: list[Group] | None = None, **counts: int) -> Collected:
    rollouts, own = [r for g in groups for r in g.rollouts], [s for g in groups for s in g.scores]
    where = {"rounds": 1, "carried": 0, "filtered": 0, "leftover": 0, **counts}
    return Collected(RolloutBatch.from_rollouts(rollouts, own), groups, groups if sampled is None else sampled, **where)


def test_rollouts() -> None:
    rollouts = [
        make_rollout((1, 2, 3), (5, 6, 7, 8), group=1, stop=StopReason.LENGTH),
        make_rollout((1, 2, 3), (), group=1),
        make_rollout((1,), (5, 6), group=2, mask=(True, False)),
        make_rollout((1,), (5, 6), group=2),
    ]
    assert rollout_metrics(rollouts) == {
        "response/length_mean": 2.0,
        "response/length_max": 4.0,
        "response/truncated_frac": 0.25,
        "response/empty": 1.0,
        "tokens/prompt": 8.0,
        "tokens/response": 8.0,
    }


def test_every_sample_is_accounted_for() -> None:
    batch = [group(1.0, None), group(0.0, 0.0)]
    found = collected(batch, sampled=[*batch, group(1.0, 1.0), group(0.0, 1.0)], rounds=2, filtered=2, leftover=2)
    assert sample_metrics(found, found.batch.response_mask) == {
        "samples/sampled": 8.0,
        "samples/carried": 0.0,
        "samples/trained": 3.0,
        "samples/filtered": 3.0,  # one unscored sample, and two samples of a group without signal
        "samples/leftover": 2.0,
        "sampling/rounds": 2.0,
        "group/zero_std_frac": 0.75,
        "tokens/trained": 6.0,
    }


def test_a_lost_sample_is_an_error() -> None:
    batch = [group(1.0, 0.0)]
    found = collected(batch, sampled=[*batch, group(1.0, 1.0)])
    with pytest.raises(AssertionError, match="lost"):
        sample_metrics(found, found.batch.response_mask)


def test_greedy_baselines_are_measured_where_there_are_any() -> None:
    found = collected([group(1.0, baseline=1.0), group(0.0, baseline=0.0), group(0.0)])
    metrics = sample_metrics(found, found.batch.response_mask)
    assert (metrics["reward/greedy_baseline"], metrics["tokens/greedy"]) == (0.5, 6.0)


def test_a_shaped_reward_keeps_its_accuracy() -> None:
    found = reward_metrics([Score(0.5, raw=1.0), Score(-0.5, raw=0.0)])
    assert (found["reward/mean"], found["reward/accuracy"]) == (0.0, 0.5)
    assert "reward/accuracy" not in reward_metrics([Score(0.5)])


def test_unmoved_tensors_are_those_that_no_part_has_moved() -> None:
    parts = [Totals({}, {}, frozenset({"a", "b"})), Totals({}, {}), Totals({}, {}, frozenset({"b", "c"}))]
    assert add_totals(parts).unmoved == {"b"}
    assert add_totals([Totals({}, {})]).unmoved is None


MASK = torch.tensor([[False, True, True], [False, True, False]])


def lagging() -> TrainBatch:
    sampled = torch.tensor([[0, -1.0, -2.0], [0, -3.0, 0]])
    old = torch.tensor([[0, -1.5, -1.0], [0, -3.0, 0]])
    rollout = batch_of(MASK, rollout_logprobs=sampled, policy_version=torch.tensor([3, 4]))
    return TrainBatch(rollout, old, torch.tensor([[0, 3.0, -1.0], [0, 4.0, 0]]))


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_policy_lag(bad: float) -> None:
    batch = lagging()
    rollout = replace(batch.rollout, rollout_logprobs=poison(batch.rollout.rollout_logprobs, MASK, bad))
    found = policy_lag_metrics(rollout, poison(batch.old_logprobs, MASK, -bad), version=5)
    assert found == {"rollout/logprob_gap": 0.5, "rollout/staleness_mean": 1.5}


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_credit(bad: float) -> None:
    batch = lagging()
    plain = replace(batch, advantages=poison(batch.advantages, MASK, bad))
    assert credit_metrics(plain) == {"advantage/mean": 2.0}
    values, returns = torch.tensor([[0, 1.0, 2.0], [0, 3.0, 0]]), torch.tensor([[0, 1.0, 2.0], [0, 6.0, 0]])
    full = replace(plain, old_values=poison(values, MASK, bad), returns=poison(returns, MASK, bad))
    # returns (1, 2, 6): variance 7; errors (0, 0, 3): variance 3
    expected = {"advantage/mean": 2.0, "critic/explained_variance": 1 - 3 / 7, "critic/value_mean": 2.0}
    # first tokens: returns (1, 6), errors (0, 3); middle and last ones: returns (2, 6), errors (0, 3)
    expected["critic/explained_variance_first"] = 1 - 4.5 / 12.5
    expected["critic/explained_variance_middle"] = expected["critic/explained_variance_last"] = 1 - 4.5 / 8
    assert credit_metrics(full) == pytest.approx(expected)


def explained(values: list[float], returns: list[float]) -> float:
    return explained_variance(torch.tensor([values]), torch.tensor([returns]), torch.ones(1, len(values), dtype=torch.bool))


def test_explained_variance() -> None:
    assert explained([1, 2, 6], [1, 2, 6]) == 1.0
    assert explained([2, 3, 7], [1, 2, 6]) == 1.0  # a constant offset explains as much
    assert explained([5, 5, 5], [1, 2, 6]) == pytest.approx(0.0)
    assert explained([6, 2, 1], [1, 2, 6]) < 0


@pytest.mark.parametrize("level", [0.0, 0.35, 1.0, -1e4])
def test_explained_variance_of_constant_returns_is_zero(level: float) -> None:
    assert explained([0.1, 0.2, 0.7], [level] * 3) == 0.0
    wobble = np.float32(level) * np.float32(1 + 1e-7)  # rounding is not variance
    assert explained([0.1, 0.2, 0.7], [level, float(wobble), level]) == 0.0


def test_explained_variance_of_one_token_or_none_is_zero() -> None:
    mask = torch.zeros(1, 2, dtype=torch.bool)
    assert explained_variance(torch.ones(1, 2), torch.ones(1, 2), mask) == 0.0
    assert explained([1.0], [3.0]) == 0.0


def test_memory() -> None:
    found = memory_metrics({"actor": {"weights": 10, "peak": 20}, "reward": {}})
    assert found == {"memory/actor/weights_bytes": 10.0, "memory/actor/peak_bytes": 20.0}


def test_explained_variance_at_places_of_a_response() -> None:
    """Masks [1, 2, 3], [1, 2] and [2]: the first tokens are 1, 1, 2, the middle ones 2, 2, 2, the last ones 3, 2, 2."""
    mask = torch.tensor([[False, True, True, True], [False, True, True, False], [False, False, True, False]])
    returns = torch.tensor([[0.0, 1, 1, 1], [0, 2, 2, 0], [0, 0, 4, 0]])
    values = torch.tensor([[9.0, 0, 1, 1], [9, 0, 1, 9], [9, 9, 4, 9]])
    batch = batch_of(mask)
    found = credit_metrics(TrainBatch(batch, torch.zeros(3, 4), torch.zeros(3, 4), old_values=values, returns=returns))
    variance = torch.tensor([1.0, 2, 4]).var()
    assert found["critic/explained_variance_first"] == pytest.approx(float(1 - torch.tensor([1.0, 2, 0]).var() / variance))
    assert found["critic/explained_variance_middle"] == pytest.approx(float(1 - torch.tensor([0.0, 1, 0]).var() / variance))
    assert found["critic/explained_variance_last"] == pytest.approx(float(1 - torch.tensor([0.0, 1, 0]).var() / variance))
