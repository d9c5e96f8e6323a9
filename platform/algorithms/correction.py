"""Correction of the policy loss for samples drawn from a distribution other than the trainer's. Pure.

Different numerics or stale weights make a rollout engine sample from mu, while the trainer's policy is pi_old. The
log-probs of both are known. The loss of each token or response is therefore weighted by rho = pi_old / mu, bounded from
above, or left out where rho is out of range.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tandem.platform.algorithms.logprobs import log_ratio
from tandem.platform.algorithms.losses import LOG_RATIO_LIMIT
from tandem.platform.config.algo import AlgoConfig
from tandem.platform.experience.masked import masked_fill_zero


@dataclass(frozen=True)
class Correction:
    """Weights of the policy loss, the mask of the tokens that remain, and metrics of both."""

    weights: Tensor  # (B, T) float32, 0 outside `mask`
    mask: Tensor  # (B, T) bool
    metrics: dict[str, float]


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """The importance ratio rho of each token or of its whole response: (B, T) float32, 0 outside the mask.

        token:     rho_t = pi_old(token) / mu(token)
        sequence:  rho   = product of rho_t over the response

    Finite: log rho is clamped to +-20.
    """
    ratios = masked_fill_zero(log_ratio(old_logprobs, rollout_logprobs), mask)
    if level == "sequence":
        ratios = ratios.sum(dim=1, keepdim=True).expand_as(ratios)
    return masked_fill_zero(ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), mask)


def correct(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, algo: AlgoConfig) -> Correction:
    """Bounded importance weights.

        truncate:  w = min(rho, max)
        mask:      w = rho where min <= rho <= max; elsewhere the token, or the response, is masked out of every loss

    Truncated: Espeholt et al., IMPALA, https://arxiv.org/abs/1802.01561 ; for engine and trainer: Yao et al., Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025. Masked: IcePop, Ling team, 2025.

    Metrics: `correction/{mean,max}` of rho, `correction/ess_frac` = (sum w)^2 / (n * sum w^2), the effective sample size as
    a share, and `correction/masked_frac`. They are taken over tokens, or over responses with at least one token
    (`algo.correction_level`).
    """
    rho = importance_weights(old_logprobs, rollout_logprobs, mask, algo.correction_level)
    kept = mask
    if algo.correction == "mask":
        kept = mask & (rho >= algo.correction_min) & (rho <= algo.correction_max)
    weights = masked_fill_zero(rho.clamp(max=algo.correction_max), kept)
    return Correction(weights, kept, _describe(rho, weights, mask, kept, algo.correction_level))


def _describe(rho: Tensor, weights: Tensor, mask: Tensor, kept: Tensor, level: str) -> dict[str, float]:
    if level == "sequence":  # one number per response: that of its first token
        rows = mask.any(dim=1)
        first = mask[rows].int().argmax(dim=1, keepdim=True)
        rho, weights, kept = (each[rows].gather(1, first).squeeze(1) for each in (rho, weights, kept))
    else:
        rho, weights, kept = rho[mask], weights[mask], kept[mask]
    if not len(rho):
        return {}
    used = weights.double()
    squares = float(used.square().sum())
    return {
        "correction/mean": float(rho.double().mean()),
        "correction/max": float(rho.max()),
        "correction/ess_frac": float(used.sum()) ** 2 / (len(used) * squares) if squares else 0.0,
        "correction/masked_frac": float((~kept).double().mean()),
    }
