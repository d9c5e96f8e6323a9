"""What a report says of the peak: how it was measured, and which shares of it are not to be believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.benchmarks.ab.verdict import finished
from tandem.platform.planning.costs import Peak


def doubts(results: Mapping[str, Any]) -> str:
    """Which shares of the peak are not shown, and why."""
    found = {why: phase for arm in finished(results).values() for phase, why in arm.get("share_problems", {}).items()}
    return "".join(f" A share shown as ? is not to be believed ({phase}): {why}." for why, phase in found.items())


def peak_text(results: Mapping[str, Any]) -> str:
    """The rate of matrix products, and how far it is to be trusted."""
    if not results["peak_flops"]:
        return "not measured"
    best = f"{results['peak_flops'] / 1e9:.0f} GFLOP/s"
    if not results.get("peak"):
        return best
    peak = Peak(**results["peak"])
    how = f"best of {peak.trials}, median {peak.median / 1e9:.0f}; load average before {peak.load_average:.2f}"
    return f"{best} ({how}, other processes meanwhile on {peak.others:.0%} of the cores){_but(peak.problem())}"


def _but(problem: str | None) -> str:
    return f". Not to be compared with: {problem}" if problem else ""
