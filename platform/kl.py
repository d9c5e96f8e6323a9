"""Estimators of KL(policy || reference) from one sampled token.

With lr = logp - ref_logp:

    k1 = lr                    unbiased, high variance, may be negative
    k2 = lr^2 / 2              as a loss, its expected gradient is that of KL(policy || reference)
    k3 = exp(-lr) - 1 + lr     unbiased, never negative; as a loss, its gradient is that of KL(reference || policy)

J. Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tandem.platform.logprobs import log_ratio

CAP = 10.0  # largest value of an estimate of one token


def k1(log_ratio: Tensor) -> Tensor:
    """lr, capped to +-CAP."""
    return log_ratio.clamp(-CAP, CAP)


def k2(log_ratio: Tensor) -> Tensor:
    """lr^2 / 2, capped at CAP: lr is clamped before it is squared, so the gradient beyond is 0 and never 0 * inf."""
    bound = math.sqrt(2 * CAP)
    return 0.5 * log_ratio.clamp(-bound, bound).square()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-lr) - 1 + lr, capped at CAP.

    The exponent is clamped before `expm1`, so the gradient in the saturated zone is 0 and never inf * 0.
    """
    bounded = log_ratio.clamp(min=-CAP)
    return (torch.expm1(-bounded) + bounded).clamp(max=CAP)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By the name used in `algo.kl_reward_estimator` and `algo.kl_loss_estimator`."""


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token KL estimate, same shape as both arguments, computed in float32."""
    return KL_ESTIMATORS[estimator](log_ratio(logprobs, ref_logprobs))
