"""Comparing two arms: planted results give the known interval."""

from __future__ import annotations

import math
import random

import pytest

from tandem.benchmarks.ab.comparison import (
    expanded_tail,
    interquartile_mean,
    mean,
    paired_difference,
    probability_of_improvement,
    value_at,
)


def test_two_seeds_by_hand() -> None:
    """Differences 1 and 3: the four resamples have means 1, 2, 2 and 3. With two seeds, no tail is cut off."""
    found = paired_difference([2.0, 4.0], [1.0, 1.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 1.0, 3.0))
    assert not found.shows_difference  # two signs alike are no evidence


def test_five_seeds_by_hand() -> None:
    """Differences 1 to 5: t = 2.776, so Phi(-sqrt(5/4) * 2.776) = 0.00096 is cut off, index 2.99 of resamples 0..3124.

    The lowest resample is 1, 1, 1, 1, 1; the next five contain one 2 and have mean 1.2. The highest mirror these.
    """
    found = paired_difference([2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert expanded_tail(5) == pytest.approx(0.000955, abs=2e-6)
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 1.2, 4.8))
    assert found.shows_difference


def test_tails_follow_from_students_table() -> None:
    """Phi(-sqrt(n / (n - 1)) t) for t with 1, 9 and 100 degrees of freedom: -17.97, -2.384 and -1.994 deviations."""
    assert expanded_tail(1) == 0.0
    assert expanded_tail(2) < 1e-70
    assert expanded_tail(10) == pytest.approx(0.00856, abs=2e-5)
    assert expanded_tail(101) == pytest.approx(0.0231, abs=5e-5)


def test_many_seeds_are_normal() -> None:
    """400 differences with mean 0.1 and deviation 1 give the interval 0.1 +- 1.96 / 20."""
    draw = random.Random(0)
    raw = [draw.gauss(0, 1) for _ in range(400)]
    centre, spread = mean(raw), math.sqrt(mean([(one - mean(raw)) ** 2 for one in raw]))
    ours = [0.1 + (one - centre) / spread for one in raw]
    found = paired_difference(ours, [0.0] * 400)
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.002, 0.198), abs=0.006)
    assert paired_difference(ours, [0.0] * 400) == found  # a second call gives the same interval


def test_pairing_takes_out_what_seeds_share() -> None:
    """Seeds differ far more than arms, but comparing the arms seed by seed finds the better arm."""
    seeds = [0.1, 0.9, 0.4, 0.7, 0.2]
    assert paired_difference([seed + 0.02 for seed in seeds], seeds).shows_difference
    assert not paired_difference(seeds[1:] + seeds[:1], seeds).shows_difference


def test_an_arm_against_itself_shows_nothing() -> None:
    """With five seeds, 9 % of pairs of equal arms are reported as different; five equal signs alone occur in 6 %."""
    draw = random.Random(1)
    claims = sum(
        paired_difference([draw.gauss(0, 1) for _ in range(5)], [draw.gauss(0, 1) for _ in range(5)]).shows_difference
        for _ in range(1000)
    )
    assert 60 <= claims <= 120


def test_interquartile_mean() -> None:
    assert interquartile_mean([9.0, 1.0, 2.0, 3.0, -50.0]) == 2.0
    assert interquartile_mean([1.0, 3.0]) == 2.0
    assert interquartile_mean(list(range(8))) == mean([2, 3, 4, 5])


def test_probability_of_improvement() -> None:
    assert probability_of_improvement([2.0, 3.0], [1.0, 2.0]) == 0.875  # 3 wins and a tie of 4 pairs
    assert probability_of_improvement([1.0], [1.0]) == 0.5


def test_a_curve_is_cut_at_a_budget() -> None:
    curve = [(0.0, 0.5), (100.0, 0.7), (300.0, 0.9)]
    assert [value_at(curve, budget) for budget in (0, 50, 100, 200, 300)] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])
    with pytest.raises(ValueError, match="a budget of 301 is outside the measured range, 0 to 300"):
        value_at(curve, 301)


def test_unequal_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="3 seeds against 2"):
        paired_difference([1.0, 2.0, 3.0], [1.0, 2.0])
