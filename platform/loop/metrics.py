"""Computes flat metrics from the data of a step. Pure; the README lists the keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tandem.platform.algorithms.logprobs import log_ratio
from tandem.platform.experience.batch import Rollout, RolloutBatch, Score, TrainBatch
from tandem.platform.experience.masked import masked_mean
from tandem.platform.experience.metrics import Metrics
from tandem.platform.loop.collector import Collected
from tandem.platform.loop.group import samples_in
from tandem.platform.loop.protocols import Totals

TOTALS = ("mean", "std", "min", "max", "greedy_baseline", "overlong_penalty", "accuracy")
"""Metrics `reward/*` of the whole reward; the others are its parts, by name."""


def reduce_totals(parts: Iterable[Totals]) -> Metrics:
    """Adds up the totals of micro-batches, ranks or mini-batches, and divides at the end."""
    total = add_totals(parts)
    means = {name: num / den for name, (num, den) in total.sums.items() if den > 0}
    return {**means, **total.maxima}


def add_totals(parts: Iterable[Totals]) -> Totals:
    """The totals of all parts: sums of numerators and denominators, maxima, and the tensors that no part has moved."""
    parts = list(parts)
    sums: dict[str, tuple[float, float]] = {}
    maxima: dict[str, float] = {}
    for part in parts:
        for name, (num, den) in part.sums.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + num, before[1] + den
        for name, value in part.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    unmoved = [part.unmoved for part in parts if part.unmoved is not None]
    return Totals(sums, maxima, frozenset.intersection(*unmoved) if unmoved else None)


def reward_metrics(scores: Sequence[Score]) -> Metrics:
    """`reward/*` over the samples that could be scored; unscorable ones are counted by problem.

    `reward/accuracy` is the mean reward before shaping, if rewards are shaped.
    """
    rewards = torch.tensor([score.reward for score in scores if score.reward is not None], dtype=torch.float64)
    metrics: Metrics = {"reward/unscorable": float(len(scores) - len(rewards))}
    for problem, count in Counter(score.problem for score in scores if score.problem).items():
        metrics[f"reward/unscorable_{problem}"] = float(count)
    if len(rewards):
        metrics["reward/mean"] = float(rewards.mean())
        metrics["reward/std"] = float(rewards.std(correction=0))
        metrics["reward/min"], metrics["reward/max"] = float(rewards.min()), float(rewards.max())
    raw = [score.raw for score in scores if score.raw is not None]
    if raw:  # rewards are shaped
        metrics["reward/accuracy"] = sum(raw) / len(raw)
    for part in {name: None for score in scores for name in score.parts}:
        known = [value for score in scores if (value := score.parts.get(part)) is not None]
        if known:
            metrics[f"reward/{part}"] = sum(known) / len(known)
    return metrics


def rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """`response/*` and `tokens/{prompt,response}` of sampled responses."""
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    return {
        "response/length_mean": sum(lengths) / len(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated_frac": sum(rollout.stop.is_truncated for rollout in rollouts) / len(rollouts),
        "response/empty": float(lengths.count(0)),
        "tokens/prompt": float(sum(len(rollout.prompt.ids) for rollout in rollouts)),
        "tokens/response": float(sum(lengths)),
    }


def sample_metrics(collected: Collected, mask: Tensor) -> Metrics:
    """`samples/*`, `group/*` and `sampling/*`: what became of the samples of a step. `mask` (B, T): tokens in the losses.

    sampled + carried = trained + filtered + leftover
    """
    sampled, rows = samples_in(collected.sampled), len(mask)
    trained = int(mask.any(dim=1).sum())
    filtered = collected.filtered + rows - trained
    assert sampled + collected.carried == trained + filtered + collected.leftover, "a sample is lost or counted twice"
    silent = sum(not group.varies("reward") for group in collected.sampled)
    metrics = {
        "samples/sampled": float(sampled),
        "samples/carried": float(collected.carried),
        "samples/trained": float(trained),
        "samples/filtered": float(filtered),
        "samples/leftover": float(collected.leftover),
        "sampling/rounds": float(collected.rounds),
        "group/zero_std_frac": silent / len(collected.sampled),
        "tokens/trained": float(mask.sum()),
    }
    baselines = [group.baseline for group in collected.groups if group.baseline is not None]
    if baselines:
        metrics["reward/greedy_baseline"] = sum(baselines) / len(baselines)
        metrics["tokens/greedy"] = float(sum(group.greedy_tokens for group in collected.sampled))
    return metrics


def policy_lag_metrics(batch: RolloutBatch, old_logprobs: Tensor, version: int) -> Metrics:
    """How far the sampler was from the trained policy: in log-probs, and in policy versions.

    Uses the mask from before any correction: a correction that masks out the largest gaps must not hide them.
    """
    gap = log_ratio(old_logprobs, batch.rollout_logprobs).abs()
    return {
        "rollout/logprob_gap": float(masked_mean(gap, batch.response_mask)),
        "rollout/staleness_mean": float((version - batch.policy_version).double().mean()),
    }


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens of the mask; 0 if the returns do not vary in float32.

    1: the values explain the returns fully; 0: no better than a constant; below 0: worse than a constant.
    """
    known, targets = values[mask].double(), returns[mask].double()
    if targets.numel() < 2 or targets.std() <= 1e-5 * targets.abs().max().clamp(min=1.0):
        return 0.0
    return float(1 - (targets - known).var() / targets.var())


def credit_metrics(batch: TrainBatch) -> Metrics:
    """`advantage/*` over tokens; with a critic also `critic/value_mean`, and `critic/explained_variance` over all tokens
    and at three of them: `_first` (the critic has seen the prompt alone), `_middle` and `_last`.
    """
    metrics = {"advantage/mean": float(masked_mean(batch.advantages, batch.mask))}
    if batch.old_values is not None and batch.returns is not None:
        metrics["critic/explained_variance"] = explained_variance(batch.old_values, batch.returns, batch.mask)
        for name, place in _places(batch.mask).items():
            metrics[f"critic/explained_variance_{name}"] = explained_variance(batch.old_values, batch.returns, place)
        metrics["critic/value_mean"] = float(masked_mean(batch.old_values, batch.mask))
    return metrics


def _places(mask: Tensor) -> dict[str, Tensor]:
    """(B, T) masks of the first, the middle and the last token of the mask in each row; of n tokens, n // 2 come before
    the middle one.
    """
    number = mask.cumsum(1) * mask  # 1 for the first token of the mask
    count = mask.sum(1, keepdim=True)
    places = {"first": torch.ones_like(count), "middle": count // 2 + 1, "last": count}
    return {name: mask & (number == place) for name, place in places.items()}


def memory_metrics(memory: Mapping[str, Mapping[str, int]]) -> Metrics:
    """`memory/<role>/<kind>_bytes`."""
    return {f"memory/{role}/{kind}_bytes": float(n) for role, kinds in memory.items() for kind, n in kinds.items()}
