"""The formulas of the papers in float64, written from the papers: advantages and their processing before the losses.

A sequence is the list of the tokens that its policy wrote, without prompt, gaps and padding. All code is plain loops over
such lists. `reference_losses.py` has the losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reference_losses import kl_value, sequence_weights

from tandem.platform.config.algo import AlgoConfig

Numbers = list[float]
Estimate = Callable[[Sequence["Sample"], AlgoConfig], list[Numbers]]


@dataclass(frozen=True)
class Sample:
    """A response: its lists have one entry per token that the policy wrote."""

    group: int
    scored: bool
    truncated: bool
    muted: bool
    baseline: float
    rewards: Numbers
    ends: list[bool]
    values: Numbers
    final: float
    old: Numbers
    ref: Numbers
    sampler: Numbers

    @property
    def outcome(self) -> float:
        return math.fsum(self.rewards)


def mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def deviation(numbers: Sequence[float], spread: str) -> float:
    """The standard deviation with n - 1 ("sample") or n ("population"), plus 1e-6; 1 for "none"."""
    if spread == "none":
        return 1.0
    squares = math.fsum((number - mean(numbers)) ** 2 for number in numbers)
    return math.sqrt(squares / (len(numbers) - (spread == "sample"))) + 1e-6


def gae(rewards: Numbers, values: Numbers, final: float, gamma: float, lam: float) -> tuple[Numbers, Numbers]:
    """Schulman et al. 2016, eq. 16: A_t = sum_k (gamma lam)^k delta_{t+k}; returns A_t + V_t."""
    following = [*values, final][1:]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    advantages = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def _final(sample: Sample, algo: AlgoConfig) -> float:
    return sample.final if algo.bootstrap_truncated and sample.truncated else 0.0


def gae_advantages(samples: Sequence[Sample], algo: AlgoConfig) -> list[Numbers]:
    """GAE with the policy's own lambda; VAPO section 4.2: lambda = 1 - 1 / (alpha l), not below 0."""
    found = []
    for sample in samples:
        lam = algo.lam if algo.lam_policy is None else algo.lam_policy
        if algo.lam_length_alpha is not None and sample.rewards:
            lam = max(0.0, 1 - 1 / (algo.lam_length_alpha * len(sample.rewards)))
        found.append(gae(sample.rewards, sample.values, _final(sample, algo), algo.gamma, lam)[0])
    return found


def gae_returns(samples: Sequence[Sample], algo: AlgoConfig) -> list[Numbers]:
    """The critic's targets: lambda returns with the critic's lambda."""
    return [gae(s.rewards, s.values, _final(s, algo), algo.gamma, algo.lam)[1] for s in samples]


def _peers(sample: Sample, samples: Sequence[Sample]) -> list[Sample]:
    return [other for other in samples if other.group == sample.group and other.scored]


def _per_response(samples: Sequence[Sample], advantage: Callable[[Sample, list[Sample]], float]) -> list[Numbers]:
    """Gives every token its response's advantage: 0 if it is unscored, has no peer, or all peers have the same outcome."""
    found = []
    for sample in samples:
        peers = _peers(sample, samples)
        silent = not sample.scored or len({peer.outcome for peer in peers}) < 2
        found.append([0.0 if silent else advantage(sample, peers)] * len(sample.rewards))
    return found


def grpo(samples: Sequence[Sample], algo: AlgoConfig) -> list[Numbers]:
    """DeepSeekMath section 4.1.2: (r - mean r) / std r over the group; without the std, Dr. GRPO."""

    def relative(sample: Sample, peers: list[Sample]) -> float:
        outcomes = [peer.outcome for peer in peers]
        return (sample.outcome - mean(outcomes)) / deviation(outcomes, algo.group_std)

    return _per_response(samples, relative)


def dr_grpo(samples: Sequence[Sample], algo: AlgoConfig) -> list[Numbers]:
    """Liu et al. 2025: r - mean r over the group."""
    return _per_response(samples, lambda sample, peers: sample.outcome - mean([peer.outcome for peer in peers]))


def rloo(samples: Sequence[Sample], algo: AlgoConfig) -> list[Numbers]:
    """Ahmadian et al. 2024: r less the mean of the OTHER samples of the group."""

    def relative(sample: Sample, peers: list[Sample]) -> float:
        return sample.outcome - mean([peer.outcome for peer in peers if peer is not sample])

    return _per_response(samples, relative)


def opo(samples: Sequence[Sample], algo: AlgoConfig) -> list[Numbers]:
    """Hao et al. 2025: r less the mean of the group's rewards weighted with the lengths of its responses."""

    def relative(sample: Sample, peers: list[Sample]) -> float:
        weights = [len(peer.rewards) for peer in peers]
        weighted = math.fsum(weight * peer.outcome for weight, peer in zip(weights, peers, strict=True))
        return sample.outcome - weighted / sum(weights)

    return _per_response(samples, relative)


def reinforce(samples: Sequence[Sample], algo: AlgoConfig) -> list[Numbers]:
    """Williams 1992 with the mean of the batch as the baseline."""
    known = [sample.outcome for sample in samples if sample.scored]
    return [[s.outcome - mean(known) if s.scored else 0.0] * len(s.rewards) for s in samples]


def remax(samples: Sequence[Sample], algo: AlgoConfig) -> list[Numbers]:
    """Li et al. 2023: r less the reward of the greedy response; 0 where one of them is missing."""
    found = []
    for sample in samples:
        known = sample.scored and math.isfinite(sample.baseline)
        found.append([sample.outcome - sample.baseline if known else 0.0] * len(sample.rewards))
    return found


def rewards_to_go(samples: Sequence[Sample], algo: AlgoConfig) -> list[Numbers]:
    """REINFORCE++ before whitening: sum_k gamma^k r_{t+k}, the KL penalty being in r."""
    return [
        [sum(algo.gamma ** (k - t) * s.rewards[k] for k in range(t, len(s.rewards))) for t in range(len(s.rewards))]
        for s in samples
    ]


def step_rewards(sample: Sample) -> list[tuple[int, float]]:
    """(index of the last token, reward) of each step."""
    steps, start = [], 0
    for t, ends in enumerate(sample.ends):
        if ends:
            steps.append((t, math.fsum(sample.rewards[start : t + 1])))
            start = t + 1
    return steps


def process_grpo(samples: Sequence[Sample], algo: AlgoConfig) -> list[Numbers]:
    """DeepSeekMath section 4.1.3: step rewards normalised over all steps of the group, summed over steps from t on."""
    found = []
    for sample in samples:
        worths = [worth for peer in _peers(sample, samples) for _, worth in step_rewards(peer)]
        advantages = [0.0] * len(sample.rewards)
        if sample.scored and len({round(worth, 12) for worth in worths}) > 1:
            centre, spread = mean(worths), deviation(worths, algo.group_std)
            steps = [(end, (worth - centre) / spread) for end, worth in step_rewards(sample)]
            advantages = [math.fsum(r for end, r in steps if end >= t) for t in range(len(sample.rewards))]
        found.append(advantages)
    return found


@dataclass(frozen=True)
class Known:
    """An estimator of the literature, and whether it is whitened over the batch by definition."""

    estimate: Estimate
    whitens: bool = False


ESTIMATORS: dict[str, Known] = {
    "gae": Known(gae_advantages),
    "grpo": Known(grpo),
    "dr_grpo": Known(dr_grpo),
    "grpo_process": Known(process_grpo),
    "rloo": Known(rloo),
    "reinforce": Known(reinforce),
    "reinforce_pp": Known(rewards_to_go, whitens=True),
    "reinforce_pp_baseline": Known(dr_grpo, whitens=True),
    "remax": Known(remax),
    "opo": Known(opo),
}


def penalised(sample: Sample, algo: AlgoConfig) -> Sample:
    """InstructGPT eq. 2: r_t - coef * KL_t on every token."""
    pairs = zip(sample.rewards, sample.old, sample.ref, strict=True)
    rewards = [r - algo.kl_reward_coef * kl_value(old - ref, algo.kl_reward_estimator) for r, old, ref in pairs]
    return Sample(**{**vars(sample), "rewards": rewards})


def kept_tokens(sample: Sample, algo: AlgoConfig) -> list[bool]:
    """The tokens that count in the losses: tokens of samples that are not muted or filtered, with a weight in range."""
    if sample.muted or (algo.overlong_filter and sample.truncated):
        return [False] * len(sample.rewards)
    if algo.correction != "mask":
        return [True] * len(sample.rewards)
    weights = sequence_weights(sample.old, sample.sampler, algo.correction_level)
    return [algo.correction_min <= weight <= algo.correction_max for weight in weights]


def whitened(rows: list[list[float | None]]) -> list[list[float | None]]:
    """Mean 0 and standard deviation 1 (n - 1) over all numbers; one number alone stays."""
    numbers = [number for row in rows for number in row if number is not None]
    if len(numbers) < 2:
        return rows
    centre, spread = mean(numbers), deviation(numbers, "sample")
    return [[None if number is None else (number - centre) / spread for number in row] for row in rows]


def credit(samples: Sequence[Sample], estimator: str, algo: AlgoConfig) -> list[list[float | None]]:
    """Advantage of every token; None where the token does not count in the losses."""
    known = ESTIMATORS[estimator]
    estimates = known.estimate([penalised(sample, algo) for sample in samples], algo)
    rows: list[list[float | None]] = [
        [value if keep else None for value, keep in zip(row, kept_tokens(sample, algo), strict=True)]
        for row, sample in zip(estimates, samples, strict=True)
    ]
    return whitened(rows) if known.whitens or algo.whiten_advantages else rows
