"""The losses of the papers in float64, written from the papers, over lists of the tokens a policy wrote.

Losses are functions of (new log-probs, frozen log-probs, ...). `frozen` is used wherever a paper stops the gradient, so the
finite difference in the first argument alone is the gradient of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.platform.config.algo import AlgoConfig

Numbers = list[float]


def clip(number: float, low: float, high: float) -> float:
    return min(max(number, low), high)


def kl_value(log_ratio: float, estimator: str) -> float:
    """Schulman's estimators of KL(policy || reference), for log-ratios far from the cap."""
    return {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": math.exp(-log_ratio) - 1 + log_ratio,
        "abs": abs(log_ratio),
    }[estimator]


def kl_loss(new: float, frozen: float, ref: float, estimator: str, gradient: str | None) -> float:
    """The value of one estimator with the gradient of another."""
    if gradient is None:
        return kl_value(new - ref, estimator)
    return kl_value(frozen - ref, estimator) + kl_value(new - ref, gradient) - kl_value(frozen - ref, gradient)


def clipped(ratio: float, advantage: float, algo: AlgoConfig) -> float:
    """PPO eq. 7 with DAPO's two bounds; Ye et al.: max(min(...), c A) of the objective where A < 0."""
    objective = min(ratio * advantage, clip(ratio, 1 - algo.clip_ratio_low, 1 + algo.clip_ratio_high) * advantage)
    if algo.dual_clip is not None and advantage < 0:
        objective = max(objective, algo.dual_clip * advantage)
    return -objective


def clipped_surrogate(new: Numbers, frozen: Numbers, old: Numbers, advantages: Numbers, algo: AlgoConfig) -> Numbers:
    return [clipped(math.exp(n - o), a, algo) for n, o, a in zip(new, old, advantages, strict=True)]


def gspo_ratio(new: Numbers, old: Numbers) -> float:
    """GSPO eq. 7: (pi(y) / pi_old(y)) ^ (1 / |y|)."""
    return math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))


def gspo(new: Numbers, frozen: Numbers, old: Numbers, advantages: Numbers, algo: AlgoConfig) -> Numbers:
    """GSPO-token, eq. 13 and 14: s_t = sg(s) * pi(t) / sg(pi(t))."""
    if not new:
        return []
    whole = gspo_ratio(frozen, old)
    return [clipped(whole * math.exp(n - f), a, algo) for n, f, a in zip(new, frozen, advantages, strict=True)]


def cispo(new: Numbers, frozen: Numbers, old: Numbers, advantages: Numbers, algo: AlgoConfig) -> Numbers:
    """MiniMax-M1 eq. 4 and 5: sg(clip(ratio)) * A * log pi."""
    low, high = 1 - algo.clip_ratio_low, 1 + algo.clip_ratio_high
    ratios = [clip(math.exp(f - o), low, high) for f, o in zip(frozen, old, strict=True)]
    return [-r * a * n for r, a, n in zip(ratios, advantages, new, strict=True)]


def policy_gradient(new: Numbers, frozen: Numbers, old: Numbers, advantages: Numbers, algo: AlgoConfig) -> Numbers:
    return [-a * n for a, n in zip(advantages, new, strict=True)]


OBJECTIVES: dict[str, Callable[[Numbers, Numbers, Numbers, Numbers, AlgoConfig], Numbers]] = {
    "clipped_surrogate": clipped_surrogate,
    "gspo": gspo,
    "cispo": cispo,
    "policy_gradient": policy_gradient,
}


def sequence_weights(old: Numbers, sampler: Numbers, level: str) -> Numbers:
    """pi_old / mu of each token, or the product over the response on each of its tokens."""
    ratios = [math.exp(o - s) for o, s in zip(old, sampler, strict=True)]
    return ratios if level == "token" else [math.prod(ratios)] * len(ratios)


def effective_share(weights: Sequence[float]) -> float:
    """Kong 1992: (sum w)^2 / (n sum w^2)."""
    squares = sum(weight**2 for weight in weights)
    return sum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


def overlong(tokens: int, longest: int, buffer: int) -> float:
    """DAPO eq. 13."""
    if tokens <= longest - buffer:
        return 0.0
    if tokens <= longest:
        return ((longest - buffer) - tokens) / buffer
    return -1.0


def aggregate(rows: Sequence[Numbers], mode: str, longest: int) -> float:
    """One number from the token losses of a mini-batch; rows without a token count for nothing."""
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    return {
        "token-mean": sum(map(sum, rows)) / sum(map(len, rows)),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum": sum(map(sum, rows)) / len(rows),
        "seq-mean-token-sum-norm": sum(map(sum, rows)) / (len(rows) * longest),
    }[mode]


def value_loss(value: float, old: float, target: float, bound: float | None) -> float:
    """Half the larger of the squared errors of the value and of the value held near the old one."""
    if bound is None:
        return (value - target) ** 2 / 2
    near = clip(value, old - bound, old + bound)
    return max((value - target) ** 2, (near - target) ** 2) / 2


@dataclass(frozen=True)
class Row:
    """The inputs of the policy's objective for one response, with one entry per token that counts."""

    old: Numbers
    ref: Numbers
    advantages: Numbers
    weights: Numbers
    entropy: Numbers
    positive: bool


def policy_objective(
    new: Sequence[Numbers], frozen: Sequence[Numbers], rows: Sequence[Row], name: str, algo: AlgoConfig, longest: int
) -> float:
    """Aggregated policy loss + KL - entropy, and the mean NLL over the tokens of right answers."""
    losses = []
    for n, f, row in zip(new, frozen, rows, strict=True):
        policy = OBJECTIVES[name](n, f, row.old, row.advantages, algo)
        estimates = [
            kl_loss(now, held, ref, algo.kl_loss_estimator, algo.kl_loss_gradient)
            for now, held, ref in zip(n, f, row.ref, strict=True)
        ]
        parts = zip(policy, row.weights, estimates, row.entropy, strict=True)
        losses.append([p * w + algo.kl_loss_coef * k - algo.entropy_coef * e for p, w, k, e in parts])
    right = [-number for n, row in zip(new, rows, strict=True) if row.positive for number in n]
    imitation = sum(right) / len(right) if right else 0.0
    return aggregate(losses, algo.loss_aggregation, longest) + algo.positive_nll_coef * imitation


def slope(function: Callable[[list[Numbers]], float], at: Sequence[Numbers], row: int, token: int) -> float:
    """The central difference of a function of log-probs with respect to one of them."""
    step = 1e-5

    def moved(by: float) -> float:
        point = [list(numbers) for numbers in at]
        point[row][token] += by
        return function(point)

    return (moved(step) - moved(-step)) / (2 * step)
