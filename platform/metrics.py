"""From the data of a step to flat metrics. Pure; the keys are listed in the README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tandem.platform.advantages import zero_std_groups
from tandem.platform.batch import Rollout, RolloutBatch, Score, TrainBatch
from tandem.platform.masked import masked_mean
from tandem.platform.protocols import Totals

Metrics = dict[str, float]
TOTALS = ("mean", "std", "min", "max")
"""Metrics `reward/*` of the whole reward; the others are its parts, by name."""


def reduce_totals(parts: Iterable[Totals]) -> Metrics:
    """Adds up the totals of micro-batches, ranks or mini-batches, and divides at the end."""
    total = add_totals(parts)
    means = {name: num / den for name, (num, den) in total.sums.items() if den > 0}
    return {**means, **total.maxima}


def add_totals(parts: Iterable[Totals]) -> Totals:
    """The totals of all parts: numerators and denominators summed, maxima taken."""
    sums: dict[str, tuple[float, float]] = {}
    maxima: dict[str, float] = {}
    for part in parts:
        for name, (num, den) in part.sums.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + num, before[1] + den
        for name, value in part.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    return Totals(sums, maxima)


def reward_metrics(scores: Sequence[Score]) -> Metrics:
    """`reward/*` over the samples that could be scored; unscorable ones are counted by problem."""
    rewards = torch.tensor([score.reward for score in scores if score.reward is not None], dtype=torch.float64)
    metrics: Metrics = {"reward/unscorable": float(len(scores) - len(rewards))}
    for problem, count in Counter(score.problem for score in scores if score.problem).items():
        metrics[f"reward/unscorable_{problem}"] = float(count)
    if len(rewards):
        metrics["reward/mean"] = float(rewards.mean())
        metrics["reward/std"] = float(rewards.std(correction=0))
        metrics["reward/min"], metrics["reward/max"] = float(rewards.min()), float(rewards.max())
    for part in {name: None for score in scores for name in score.parts}:
        known = [value for score in scores if (value := score.parts.get(part)) is not None]
        if known:
            metrics[f"reward/{part}"] = sum(known) / len(known)
    return metrics


def rollout_metrics(rollouts: Sequence[Rollout], batch: RolloutBatch) -> Metrics:
    """`response/*`, `group/*`, `samples/*` and `tokens/*` of the samples of a step."""
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    trained = int(batch.response_mask.any(dim=1).sum())
    silent, groups = zero_std_groups(batch.rewards, batch.group_ids, batch.scored)
    return {
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated_frac": sum(rollout.stop.is_truncated for rollout in rollouts) / len(rollouts),
        "response/empty": float(lengths.count(0)),
        "group/zero_std_frac": silent / groups,
        "samples/sampled": float(len(rollouts)),
        "samples/trained": float(trained),
        "samples/filtered": float(len(rollouts) - trained),
        "tokens/prompt": float(sum(len(rollout.prompt.ids) for rollout in rollouts)),
        "tokens/response": float(sum(lengths)),
        "tokens/trained": float(batch.response_mask.sum()),
    }


def policy_lag_metrics(batch: TrainBatch, version: int) -> Metrics:
    """How far the sampler was from the policy that learns: in log-probs, and in versions."""
    gap = (batch.old_logprobs - batch.rollout.rollout_logprobs).abs()
    return {
        "rollout/logprob_gap": float(masked_mean(gap, batch.mask)),
        "rollout/staleness_mean": float((version - batch.rollout.policy_version).double().mean()),
    }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens of the mask; 0 where the returns do not vary in float32.

    1: the values explain everything; 0: no more than a constant would; below 0: worse than a constant.
    """
    known, targets = values[mask].double(), returns[mask].double()
    if targets.numel() < 2 or targets.std() <= 1e-5 * targets.abs().max().clamp(min=1.0):
        return 0.0
    return float(1 - (targets - known).var() / targets.var())


def credit_metrics(batch: TrainBatch) -> Metrics:
    """`advantage/*` over tokens, and `critic/explained_variance` where there is a critic."""
    metrics = {"advantage/mean": float(masked_mean(batch.advantages, batch.mask))}
    if batch.old_values is not None and batch.returns is not None:
        metrics["critic/explained_variance"] = explained_variance(batch.old_values, batch.returns, batch.mask)
        metrics["critic/value_mean"] = float(masked_mean(batch.old_values, batch.mask))
    return metrics


def memory_metrics(memory: Mapping[str, Mapping[str, int]]) -> Metrics:
    """`memory/<role>/<kind>_bytes`."""
    return {f"memory/{role}/{kind}_bytes": float(n) for role, kinds in memory.items() for kind, n in kinds.items()}


class FlatReward:
    """Notices a run whose reward never varies: nothing can be learned from it, and it often means a wrong parser."""

    AFTER = 10  # steps

    def __init__(self) -> None:
        self._flat = 0

    def __call__(self, metrics: Metrics) -> str | None:
        """What to tell the user after this step: once, when all samples of so many steps in a row had one reward."""
        self._flat = self._flat + 1 if metrics.get("reward/std", 0.0) == 0 else 0
        if self._flat != self.AFTER:
            return None
        reward = metrics.get("reward/mean", 0.0)
        return (
            f"warning: in {self.AFTER} steps every sample had the same reward ({reward:g}), so nothing can be learned. "
            "Look at samples/: does the reward function read what the model writes? "
            "rollout.max_response_tokens may cut the answer off"
        )
