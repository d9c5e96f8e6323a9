"""The objective of each trained role: from a forward pass and a TrainBatch to a LossOutput. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.platform.algorithms import PolicyLoss
from tandem.platform.batch import LossOutput, TrainBatch
from tandem.platform.config import AlgoConfig
from tandem.platform.kl import kl
from tandem.platform.losses import aggregate, clipped_value_loss, importance_ratio
from tandem.platform.masked import masked_fill_zero, masked_sum


def policy_objective(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, policy_loss: PolicyLoss, algo: AlgoConfig, max_tokens: int
) -> LossOutput:
    """Policy loss + kl_loss_coef * KL - entropy_coef * entropy, each aggregated with the global denominators.

    Args:
        logprobs, entropy: (B, T) float32 of the model being trained. max_tokens: the longest response, in tokens.
    """
    mask = batch.mask
    tokens = mask.sum()
    # Selected before any arithmetic: in a backward pass, 0 * NaN from outside the mask would be NaN.
    logprobs, entropy = masked_fill_zero(logprobs, mask), masked_fill_zero(entropy, mask)
    old_logprobs = masked_fill_zero(batch.old_logprobs, mask)
    ref_logprobs = None if batch.ref_logprobs is None else masked_fill_zero(batch.ref_logprobs, mask)
    ratio = importance_ratio(logprobs, old_logprobs, mask)
    losses, clipped = policy_loss(ratio, masked_fill_zero(batch.advantages, mask), algo)
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    if algo.kl_loss_coef > 0:
        assert ref_logprobs is not None, "a KL term needs reference log-probs"
        losses = losses + algo.kl_loss_coef * kl(logprobs, ref_logprobs, algo.kl_loss_estimator)
    if algo.entropy_coef > 0:
        losses = losses - algo.entropy_coef * entropy
    loss = aggregate(
        losses,
        mask,
        algo.loss_aggregation,
        num_tokens=batch.num_tokens,
        num_sequences=batch.num_sequences,
        max_tokens=max_tokens,
    )
    with torch.no_grad():
        if ref_logprobs is not None:
            metrics["policy/kl"] = masked_sum(kl(logprobs, ref_logprobs, "k3"), mask), tokens
        metrics["policy/loss"] = loss.detach(), _share(batch)
        metrics["policy/approx_kl"] = masked_sum(kl(old_logprobs, logprobs, "k3"), mask), tokens
        metrics["policy/clip_frac"] = masked_sum(clipped.float(), mask), tokens
        metrics["policy/entropy"] = masked_sum(entropy, mask), tokens
        largest = torch.where(mask, ratio, torch.ones_like(ratio)).max()
    return LossOutput(loss, metrics, {"policy/ratio_max": largest})


def value_objective(
    values: Tensor, batch: TrainBatch, *, value_clip: float | None, aggregation: str, max_tokens: int
) -> LossOutput:
    """Clipped value loss, aggregated like the policy's. `values` (B, T) float32 of the model being trained."""
    assert batch.old_values is not None, "the value loss reads old values"
    assert batch.returns is not None, "the value loss reads returns"
    mask = batch.mask
    losses, clipped = clipped_value_loss(
        masked_fill_zero(values, mask),
        masked_fill_zero(batch.old_values, mask),
        masked_fill_zero(batch.returns, mask),
        value_clip=value_clip,
    )
    loss = aggregate(
        losses,
        mask,
        aggregation,
        num_tokens=batch.num_tokens,
        num_sequences=batch.num_sequences,
        max_tokens=max_tokens,
    )
    metrics = {
        "critic/loss": (loss.detach(), _share(batch)),
        "critic/clip_frac": (masked_sum(clipped.float(), mask), mask.sum()),
    }
    return LossOutput(loss, metrics)


def _share(batch: TrainBatch) -> Tensor:
    """The part of its mini-batch's tokens that a micro-batch holds: summed over parts, 1 per mini-batch."""
    return batch.mask.sum() / max(batch.num_tokens, 1)
