"""Comparing two arms over paired seeds: what differs, by how much, and whether it is shown.

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
FEWEST = 5  # seeds below which nothing is called shown: with four, equal arms give four signs alike once in eight times
MOST_ENUMERATED = 6  # seeds up to which every resample is made (6^6 = 46656), so that the interval is exact
RESAMPLES = 20_000  # beyond that, drawn at random, always the same


@dataclass(frozen=True)
class Interval:
    """An estimate over so many seeds, with its confidence interval."""

    value: float
    low: float
    high: float
    seeds: int

    @property
    def shows_difference(self) -> bool:
        """Whether the interval leaves 0 out, and has seeds enough to mean it."""
        return self.seeds >= FEWEST and (self.low > 0 or self.high < 0)


def mean(values: Sequence[float]) -> float:
    """The mean."""
    return math.fsum(values) / len(values)


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean of what is left without the lowest and the highest quarter, rounded down: of five values, the middle three.

    Agarwal et al., section 4.3.
    """
    cut = len(values) // 4
    return mean(sorted(values)[cut : len(values) - cut])


def probability_of_improvement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Chance that a run of ours beats one of theirs, ties counting half; the mean over all pairs. Agarwal et al., 4.3."""
    wins = [1.0 if one > other else 0.5 if one == other else 0.0 for one in ours for other in theirs]
    return mean(wins)


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The mean of ours - theirs, seed by seed, with the bootstrap interval over seeds.

    The percentile interval is too narrow for few seeds: its resamples vary as n - 1 of n values, and it is normal where
    Student's t is due. It is expanded accordingly: Hesterberg, What Teachers Should Know About the Bootstrap, section 4.2,
    https://arxiv.org/abs/1411.5279. It never leaves the range of the differences themselves:
    with five seeds, equal arms are called different 9 times in 100.

    Raises:
        ValueError: unequal numbers of seeds, or none.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} seeds against {len(theirs)}: paired seeds are as many on both sides, and some")
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    tail = expanded_tail(len(differences))
    low, high = np.quantile(_resamples(np.asarray(differences)).mean(axis=1), [tail, 1 - tail])
    return Interval(mean(differences), float(low), float(high), len(differences))


@cache
def expanded_tail(seeds: int) -> float:
    """Share of the resamples to leave out on each side, smaller the fewer seeds there are; 0 for one.

    Phi(-sqrt(n / (n - 1)) t), with t the quantile of Student's distribution with n - 1 degrees of freedom.
    """
    if seeds < 2:
        return 0.0
    t = stats.t.ppf(1 - (1 - CONFIDENCE) / 2, seeds - 1)
    return float(stats.norm.cdf(-math.sqrt(seeds / (seeds - 1)) * t))


def value_at(curve: Sequence[tuple[float, float]], budget: float) -> float:
    """The value of a curve, points (spent, value) in order of spending, where `budget` is spent; linear between points.

    Raises:
        ValueError: the curve does not reach so far.
    """
    if not curve or not curve[0][0] <= budget <= curve[-1][0]:
        reach = f"{curve[0][0]:g} to {curve[-1][0]:g}" if curve else "nothing"
        raise ValueError(f"a budget of {budget:g} lies outside of what was measured, {reach}")
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= budget <= x1:
            return y1 if x1 == x0 else y0 + (y1 - y0) * (budget - x0) / (x1 - x0)
    return curve[-1][1]


def _resamples(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(resamples, seeds): all there are, or many."""
    count = len(values)
    if count <= MOST_ENUMERATED:
        return values[np.array(list(itertools.product(range(count), repeat=count)))]
    draw = np.random.default_rng(count)
    return values[draw.integers(count, size=(RESAMPLES, count))]
