"""The objective of each trained role: maps a forward pass and a TrainBatch to a LossOutput. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.platform.algorithms.kl import kl
from tandem.platform.algorithms.losses import aggregate, clipped_value_loss, importance_ratio, log_likelihood_loss
from tandem.platform.algorithms.registry import PolicyLoss
from tandem.platform.config.schema import AlgoConfig
from tandem.platform.experience.batch import LossOutput, TrainBatch
from tandem.platform.experience.masked import masked_fill_zero, masked_sum


def policy_objective(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, policy_loss: PolicyLoss, algo: AlgoConfig, max_tokens: int
) -> LossOutput:
    """The policy objective, to be minimised.

        policy loss + kl_loss_coef * KL - entropy_coef * entropy + positive_nll_coef * NLL of correct answers

    The first three terms are aggregated with the global denominators; the NLL is a mean over the tokens of correct answers
    (Yue et al., VAPO, section 4.3, https://arxiv.org/abs/2504.05118).

    Args:
        logprobs, entropy: (B, T) float32 of the model being trained. max_tokens: longest allowed response, in tokens.
    """
    mask = batch.mask
    # Mask before any arithmetic: in the backward pass, 0 * NaN from outside the mask would be NaN.
    logprobs, entropy = masked_fill_zero(logprobs, mask), masked_fill_zero(entropy, mask)
    old_logprobs = masked_fill_zero(batch.old_logprobs, mask)
    ref_logprobs = None if batch.ref_logprobs is None else masked_fill_zero(batch.ref_logprobs, mask)
    losses, clipped = policy_loss(logprobs, old_logprobs, masked_fill_zero(batch.advantages, mask), mask, algo)
    if batch.weights is not None:
        losses = losses * masked_fill_zero(batch.weights, mask)
    if algo.kl_loss_coef > 0:
        assert ref_logprobs is not None, "a KL term needs reference log-probs"
        losses = losses + algo.kl_loss_coef * kl(logprobs, ref_logprobs, algo.kl_loss_estimator, algo.kl_loss_gradient)
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
    if algo.positive_nll_coef > 0:
        loss = loss + algo.positive_nll_coef * positive_nll(logprobs, batch)
    with torch.no_grad():
        metrics, largest = _describe(logprobs, entropy, old_logprobs, ref_logprobs, clipped, mask)
        metrics["policy/loss"] = loss.detach(), _share(batch)
    return LossOutput(loss, metrics, largest)


def positive_nll(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    """The contribution () of these rows (B, T) to the mini-batch's mean NLL over the tokens of correct answers."""
    assert batch.positive is not None, "the NLL of correct answers needs TrainBatch.positive"
    right = batch.mask & batch.positive[:, None]
    losses = log_likelihood_loss(logprobs, torch.ones_like(logprobs))
    return masked_sum(losses, right) / max(batch.num_positive_tokens, 1)


def _describe(
    logprobs: Tensor, entropy: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, clipped: Tensor, mask: Tensor
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """Metrics of a policy update: (numerator, denominator) pairs, and maxima."""
    tokens = mask.sum()
    ratio = importance_ratio(logprobs, old_logprobs, mask)
    metrics = {
        "policy/approx_kl": (masked_sum(kl(old_logprobs, logprobs, "k3"), mask), tokens),
        "policy/clip_frac": (masked_sum(clipped.float(), mask), tokens),
        "policy/entropy": (masked_sum(entropy, mask), tokens),
    }
    if ref_logprobs is not None:
        metrics["policy/kl"] = masked_sum(kl(logprobs, ref_logprobs, "k3"), mask), tokens
    return metrics, {"policy/ratio_max": ratio.max(), "policy/ratio_gap_max": (ratio - 1).abs().max()}


def value_objective(
    values: Tensor, batch: TrainBatch, *, value_clip: float | None, aggregation: str, max_tokens: int
) -> LossOutput:
    """Clipped value loss, aggregated like the policy loss. `values`: (B, T) float32 of the model being trained."""
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
    """The micro-batch's share of the tokens of its mini-batch; the shares of a mini-batch sum to 1."""
    return batch.mask.sum() / max(batch.num_tokens, 1)
