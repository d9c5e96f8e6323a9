"""Estimators of KL(policy || reference) from one sampled token.

With lr = logp - ref_logp:

    k1 = lr                    unbiased, high variance, may be negative
    k2 = lr^2 / 2              as a loss, its expected gradient is that of KL(policy || reference)
    k3 = exp(-lr) - 1 + lr     unbiased, never negative; as a loss, its gradient is that of KL(reference || policy)
    abs = |lr|                 never negative; an upper bound of k1, not an estimate of the KL

A loss may combine the value of one estimator with the gradient of another (straight-through): k3 is easy to interpret as
a value, k2 has the correct gradient.

J. Schulman, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tandem.platform.algorithms.logprobs import log_ratio

CAP = 10.0  # largest estimate for one token


def k1(log_ratio: Tensor) -> Tensor:
    """lr, capped to +-CAP."""
    return log_ratio.clamp(-CAP, CAP)


def k2(log_ratio: Tensor) -> Tensor:
    """lr^2 / 2, capped at CAP. lr is clamped before it is squared, so the gradient beyond the cap is 0, never 0 * inf."""
    bound = math.sqrt(2 * CAP)
    return 0.5 * log_ratio.clamp(-bound, bound).square()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-lr) - 1 + lr, capped at CAP.

    The exponent is clamped before `expm1`, so the gradient beyond the cap is 0, never inf * 0.
    """
    bounded = log_ratio.clamp(min=-CAP)
    return (torch.expm1(-bounded) + bounded).clamp(max=CAP)


def absolute(log_ratio: Tensor) -> Tensor:
    """|lr|, capped at CAP."""
    return log_ratio.abs().clamp(max=CAP)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
"""Estimators by the name used in `algo.kl_reward_estimator`, `algo.kl_loss_estimator` and `algo.kl_loss_gradient`."""


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, gradient: str | None = None) -> Tensor:
    """Per-token KL estimate, same shape as both arguments, computed in float32.

    With `gradient`, the value comes from `estimator` and the gradient from the estimator named by `gradient`.
    """
    ratio = log_ratio(logprobs, ref_logprobs)
    value = KL_ESTIMATORS[estimator](ratio)
    if gradient is None or gradient == estimator:
        return value
    pulled = KL_ESTIMATORS[gradient](ratio)
    return value.detach() + (pulled - pulled.detach())


class KLController:
    """The coefficient of the KL penalty in the reward: fixed, or adapted towards a target KL.

        error = clip(KL / target - 1, -0.2, 0.2)
        coef  = coef * (1 + error * min(samples / horizon, 1))

    Ziegler et al., Fine-Tuning Language Models from Human Preferences, section 2.2, https://arxiv.org/abs/1909.08593
    (the paper sums the KL over a response; here, as in `policy/kl`, it is the mean over tokens).
    """

    def __init__(self, coef: float, target: float | None, horizon: int) -> None:
        self.coef, self._target, self._horizon = coef, target, horizon

    def observe(self, kl_per_token: float, samples: int) -> None:
        """Adapts the coefficient to the mean KL per token (nats) of `samples` samples. Without a target, does nothing."""
        if self._target is not None:
            error = min(max(kl_per_token / self._target - 1, -0.2), 0.2)
            self.coef *= 1 + error * min(samples / self._horizon, 1.0)
