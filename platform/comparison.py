"""Comparing two arms over paired seeds: what differs, by how much, and whether it is shown.

R. Agarwal et al., Deep Reinforcement Learning at the Edge of the Statistical Precipice, https://arxiv.org/abs/2108.13264
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
MOST_ENUMERATED = 6  # seeds up to which every resample is made (6^6 = 46656), so that the interval is exact
RESAMPLES = 20_000  # beyond that, drawn at random, always the same
Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def shows_difference(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


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


def paired_difference(ours: Sequence[float], theirs: Sequence[float], statistic: Statistic = mean) -> Interval:
    """ours - theirs, seed by seed, with the percentile interval of the bootstrap over seeds.

    Few seeds make few resamples: with five, the interval cannot be wider than the differences themselves, and covers less
    than its name says. It is meant to refuse rash verdicts, not to allow them.

    Raises:
        ValueError: unequal numbers of seeds, or none.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} seeds against {len(theirs)}: paired seeds are as many on both sides, and some")
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    resampled = sorted(statistic(sample) for sample in _resamples(differences))
    tail = (1 - CONFIDENCE) / 2
    return Interval(statistic(differences), quantile(resampled, tail), quantile(resampled, 1 - tail))


def quantile(ranked: Sequence[float], share: float) -> float:
    """The value below which `share` of the ranked values lie, between two of them linearly."""
    place = share * (len(ranked) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (place - below) * (ranked[above] - ranked[below])


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


def _resamples(values: Sequence[float]) -> list[Sequence[float]]:
    if len(values) <= MOST_ENUMERATED:
        return list(itertools.product(values, repeat=len(values)))
    draw = random.Random(f"bootstrap of {len(values)}")
    return [draw.choices(values, k=len(values)) for _ in range(RESAMPLES)]
