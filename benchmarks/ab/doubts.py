"""The report's notes on the peak: how it was measured, and which shares of it are unreliable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.benchmarks.ab.verdict import finished
from tandem.platform.planning.costs import Peak


def doubts(results: Mapping[str, Any]) -> str:
    """The shares of the peak that are not shown, and the reasons."""
    reasons = {why: phase for arm in finished(results).values() for phase, why in arm.get("share_problems", {}).items()}
    return "".join(f" A share shown as ? is unreliable ({phase}): {why}." for why, phase in reasons.items())


def peak_text(results: Mapping[str, Any]) -> str:
    """The rate of matrix products, and its reliability."""
    if not results["peak_flops"]:
        return "not measured"
    best = f"{results['peak_flops'] / 1e9:.0f} GFLOP/s"
    if not results.get("peak"):
        return best
    peak = Peak(**results["peak"])
    how = f"best of {peak.trials}, median {peak.median / 1e9:.0f}; load average before {peak.load_average:.2f}"
    return f"{best} ({how}, other processes meanwhile on {peak.others:.0%} of the cores){_but(peak.problem())}"


def _but(problem: str | None) -> str:
    return f". Do not compare with it: {problem}" if problem else ""
