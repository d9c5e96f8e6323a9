"""Compares two arms over paired seeds: the size of the difference and whether the data show it.

R. Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice, https://arxiv.org/abs/2108.13264
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
FEWEST = 5  # seeds needed to show a difference: with four seeds, equal arms give four equal signs one time in eight
MOST_ENUMERATED = 6  # up to this many seeds, all resamples are enumerated (6^6 = 46656), and the interval is exact
MOST_SEEDS = 200  # that are worth naming
RESAMPLES = 20_000  # for more seeds: drawn at random, from a fixed seed


@dataclass(frozen=True)
class Interval:
    """An estimate over `seeds` seeds, with its confidence interval."""

    value: float
    low: float
    high: float
    seeds: int

    @property
    def shows_difference(self) -> bool:
        """Whether the interval excludes 0 and there are enough seeds to rely on it."""
        return self.seeds >= FEWEST and (self.low > 0 or self.high < 0)


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return math.fsum(values) / len(values)


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter, rounded down: for five values, the mean of the middle three.

    Agarwal et al., section 4.3.
    """
    cut = len(values) // 4
    return mean(sorted(values)[cut : len(values) - cut])


def probability_of_improvement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Probability that a run of ours beats a run of theirs, ties counting half, over all pairs. Agarwal et al., 4.3."""
    wins = [1.0 if one > other else 0.5 if one == other else 0.0 for one in ours for other in theirs]
    return mean(wins)


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The mean of ours - theirs, seed by seed, with the bootstrap interval over seeds.

    The percentile interval is too narrow for few seeds: the variance of its resamples is too small by (n - 1) / n, and it
    is normal where Student's t is needed. It is expanded to correct both: Hesterberg, What Teachers Should Know About the
    Bootstrap, section 4.2, https://arxiv.org/abs/1411.5279. It never exceeds the range of the differences. With five seeds,
    equal arms are called different 9 times in 100.

    Raises:
        ValueError: unequal numbers of seeds, or none.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} seeds against {len(theirs)}: expected the same number, and at least one")
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    tail = expanded_tail(len(differences))
    low, high = np.quantile(_resamples(np.asarray(differences)).mean(axis=1), [tail, 1 - tail])
    return Interval(mean(differences), float(low), float(high), len(differences))


@cache
def expanded_tail(seeds: int) -> float:
    """Share of the resamples to leave out on each side; smaller for fewer seeds, and 0 for one seed.

    Phi(-sqrt(n / (n - 1)) t), where t is the quantile of Student's distribution with n - 1 degrees of freedom.
    """
    if seeds < 2:
        return 0.0
    t = stats.t.ppf(1 - (1 - CONFIDENCE) / 2, seeds - 1)
    return float(stats.norm.cdf(-math.sqrt(seeds / (seeds - 1)) * t))


def p_value(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Two-sided p-value of Student's paired t-test over seeds; None for fewer than two seeds.

    Equal differences have no variance: the p-value is then 1 if they are zero, else 0.
    """
    differences = np.asarray(ours) - np.asarray(theirs)
    if len(differences) < 2:
        return None
    if differences.std() <= 1e-12 * max(1.0, float(np.abs(differences).max())):
        return float(abs(differences.mean()) <= 1e-12)
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def false_discovery_rates(p_values: Sequence[float]) -> list[float]:
    """For each of several comparisons, the expected share of false claims if all with such a p-value or less are claimed.

    Benjamini and Hochberg, https://doi.org/10.1111/j.2517-6161.1995.tb02031.x
    """
    return stats.false_discovery_control(p_values, method="bh").tolist() if len(p_values) else []


def seeds_to_tell(ours: Sequence[float], theirs: Sequence[float]) -> int | None:
    """How many seeds would show this difference, if mean and spread stayed as they are: the smallest n for which the
    interval of Student's t excludes 0. None for fewer than two seeds, without a difference, or above MOST_SEEDS.
    """
    differences = np.asarray(ours) - np.asarray(theirs)
    if len(differences) < 2 or abs(differences.mean()) <= 1e-12:
        return None
    spread = float(differences.std(ddof=1) / abs(differences.mean()))
    enough = (n for n in range(FEWEST, MOST_SEEDS + 1) if stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * spread < math.sqrt(n))
    return next(enough, None)


def value_at(curve: Sequence[tuple[float, float]], budget: float) -> float:
    """The value of a curve, points (spent, value) in order of spending, at `budget`; interpolates linearly.

    Raises:
        ValueError: `budget` is outside the curve.
    """
    if not curve or not curve[0][0] <= budget <= curve[-1][0]:
        reach = f"{curve[0][0]:g} to {curve[-1][0]:g}" if curve else "nothing"
        raise ValueError(f"a budget of {budget:g} is outside the measured range, {reach}")
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= budget <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (budget - x0) / (x1 - x0)
    return curve[-1][1]


def _resamples(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(resamples, seeds): all possible resamples, or RESAMPLES random ones."""
    count = len(values)
    if count <= MOST_ENUMERATED:
        return values[np.array(list(itertools.product(range(count), repeat=count)))]
    draw = np.random.default_rng(count)
    return values[draw.integers(count, size=(RESAMPLES, count))]
