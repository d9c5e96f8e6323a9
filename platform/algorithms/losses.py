"""Losses: pure functions from per-token inputs to per-token losses, and their aggregation. None depends on ranks.

All (B, T) arguments follow `batch.py`; losses are minimised.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.platform.algorithms.logprobs import LEAST, log_ratio
from tandem.platform.experience.masked import masked_fill_zero

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: a larger ratio carries no information, and exp soon overflows


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """pi(token) / pi_old(token): (B, T) float32, 1 outside the mask.

    Finite for log-probs down to -inf, and 1 where both are -inf; NaN stays NaN.
    """
    return masked_fill_zero(log_ratio(logprobs, old_logprobs), mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Per-token PPO loss, and whether the clip determined it: (B, T) float32 and (B, T) bool.

        L_t = -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)
        L_t = min(L_t, -c * A)   where A < 0, with dual clip c > 1

    Schulman et al., Proximal Policy Optimization Algorithms, eq. 7, https://arxiv.org/abs/1707.06347 ; separate low and
    high: Yu et al., DAPO, https://arxiv.org/abs/2503.14476 ; dual clip: Ye et al., https://arxiv.org/abs/1912.09729
    """
    assert ratio.shape == advantages.shape, f"ratio {tuple(ratio.shape)} but advantages {tuple(advantages.shape)}"
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses, decided = torch.maximum(plain, clipped), clipped > plain
    if dual_clip is not None:
        bound = -dual_clip * advantages
        capped = (advantages < 0) & (losses > bound)
        losses, decided = torch.where(capped, bound, losses), decided | capped
    return losses, decided


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Length-normalised ratio of whole responses, with a gradient per token: (B, T) float32, 1 outside the mask.

        s_i     = exp( mean over the response of log pi(token) - log pi_old(token) )
        s_{i,t} = stop_gradient(s_i) * pi(token t) / stop_gradient(pi(token t))

    Zheng et al., Group Sequence Policy Optimization, eq. 7 and 14, https://arxiv.org/abs/2507.18071 (GSPO-token: its
    gradient equals that of GSPO if all tokens of a response have the same advantage).
    """
    ratios = masked_fill_zero(log_ratio(logprobs, old_logprobs), mask)
    means = (ratios.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)).detach()
    learned = masked_fill_zero(logprobs.float().clamp(min=LEAST), mask)
    gradient = torch.where(means.abs() <= LOG_RATIO_LIMIT, learned - learned.detach(), 0.0)  # as in `importance_ratio`
    whole = means.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * gradient.exp()
    return torch.where(mask, whole, torch.ones_like(whole))


def clipped_weight(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Per-token CISPO loss and whether the weight was clipped: (B, T) float32 and (B, T) bool.

        L_t = -stop_gradient(clip(ratio, 1 - low, 1 + high)) * A * log pi(token)

    The weight is clipped, not the update: every token keeps its gradient.

    MiniMax-M1, section 3.1, https://arxiv.org/abs/2506.13585
    """
    weights = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    return weights * log_likelihood_loss(logprobs, advantages), weights != ratio.detach()


def log_likelihood_loss(logprobs: Tensor, weights: Tensor) -> Tensor:
    """-weight * log pi(token): (B, T) float32, finite for a log-prob of -inf.

    With advantages as weights, this is the policy gradient: Williams, 1992; Sutton et al., Policy Gradient Methods for
    Reinforcement Learning with Function Approximation, 2000. With weight 1 on correct answers, it imitates them.
    """
    assert logprobs.shape == weights.shape, f"logprobs {tuple(logprobs.shape)} but weights {tuple(weights.shape)}"
    return -weights * logprobs.float().clamp(min=LEAST)


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Per-token value loss, and whether the clip determined it: (B, T) float32 and (B, T) bool.

        L_t = max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2

    Without `value_clip`, L_t = (V - R)^2 / 2. Schulman et al., as implemented in OpenAI baselines; Huang et al., The 37
    Implementation Details of PPO, detail 9.
    """
    assert values.shape == old_values.shape == returns.shape, "values, old_values and returns differ in shape"
    plain = (values - returns).square()
    if value_clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    clipped = (near - returns).square()
    # Within the clip range, `near` equals `values` up to rounding; rounding must not count as clipping.
    decided = (clipped > plain) & ((values - old_values).abs() > value_clip)
    return 0.5 * torch.maximum(plain, clipped), decided


def _token_mean(losses: Tensor, mask: Tensor, num_tokens: int, num_sequences: int, max_tokens: int) -> Tensor:
    return losses.sum() / max(num_tokens, 1)


def _seq_mean_token_mean(losses: Tensor, mask: Tensor, num_tokens: int, num_sequences: int, max_tokens: int) -> Tensor:
    return (losses.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum() / max(num_sequences, 1)


def _seq_mean_token_sum(losses: Tensor, mask: Tensor, num_tokens: int, num_sequences: int, max_tokens: int) -> Tensor:
    return losses.sum() / max(num_sequences, 1)


def _seq_mean_token_sum_norm(losses: Tensor, mask: Tensor, num_tokens: int, num_sequences: int, max_tokens: int) -> Tensor:
    return losses.sum() / (max(num_sequences, 1) * max_tokens)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, int, int, int], Tensor]] = {
    "token-mean": _token_mean,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}
"""Aggregations by the name used in `algo.loss_aggregation`.

token-mean: every token of the mini-batch has the same weight. seq-mean-token-mean: every sequence has the same weight.
seq-mean-token-sum: the weight of a sequence is its length. seq-mean-token-sum-norm: the same, divided by the length of the
longest possible response, the constant of Dr. GRPO (https://arxiv.org/abs/2503.20783).
"""


def aggregate(losses: Tensor, mask: Tensor, mode: str, *, num_tokens: int, num_sequences: int, max_tokens: int) -> Tensor:
    """Reduces the token losses (B, T) of a part of a mini-batch to one number ().

    The denominators are those of the whole mini-batch over all ranks, so the results of the parts add up to the loss of the
    mini-batch, however it is split. Sequences without a token in the mask count in neither denominator.

    Args:
        num_tokens, num_sequences: of the whole mini-batch: tokens in the mask, and sequences with at least one such token.
        max_tokens: longest allowed response, in tokens.
    """
    assert losses.shape == mask.shape, f"losses {tuple(losses.shape)} but mask {tuple(mask.shape)}"
    return AGGREGATIONS[mode](masked_fill_zero(losses, mask), mask, num_tokens, num_sequences, max_tokens)
