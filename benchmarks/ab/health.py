"""Whether an arm worked: a critic that learnt something, groups that had a signal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.benchmarks.ab.measure import Measured, noise_ratio

LEARNT = 0.1  # least explained variance of a critic that learnt something, in the second half of training
SILENT = 0.8  # largest share of groups without signal of an arm that could learn, in the second half of training
EXPLAINED = {
    "all tokens": "critic/explained_variance",
    "the first token": "critic/explained_variance_first",
    "the middle token": "critic/explained_variance_middle",
    "the last token": "critic/explained_variance_last",
}
"""Metrics of the critic by the tokens that they are over."""


def health(runs: Sequence[Measured], has_critic: bool, group: int) -> dict[str, Any]:
    """The signs of an arm that worked, as means over the second half of training and over seeds, and the `problem`.

    `explained` by the keys of EXPLAINED, `silent` is the share of groups without signal, `noise` the variance of the
    batch gradient over its squared norm. What was not measured is None.
    """
    explained = {name: _late(runs, key) if has_critic else None for name, key in EXPLAINED.items()}
    silent = _late(runs, "group/zero_std_frac") if group > 1 else None
    noise = [ratio for run in runs if (ratio := noise_ratio(run)) is not None]
    learnt = explained["all tokens"]
    problem = None
    if learnt is not None and learnt < LEARNT:
        problem = "critic did not learn"
    elif not has_critic and silent is not None and silent > SILENT:
        problem = "groups without signal"
    return {
        "explained": explained,
        "silent": silent,
        "noise": statistics.fmean(noise) if noise else None,
        "problem": problem,
    }


def verdict_text(results: Mapping[str, Any], comparison: Mapping[str, Any]) -> str:
    """The verdict, behind the names of the arms that did not work: 'critic did not learn (PPO, G=8); less'."""
    arms, labels = results["derived"]["arms"], {arm["name"]: arm["label"] for arm in results["arms"]}
    faults = {name: arms[name]["health"]["problem"] for name in (comparison["ours"], comparison["theirs"])}
    said = [f"{problem} ({labels[name]})" for name, problem in faults.items() if problem]
    return "; ".join([*said, str(comparison["verdict"])])


def _late(runs: Sequence[Measured], key: str) -> float | None:
    """The mean of a metric over the second half of the steps, then over the runs that measured it."""
    columns = [run.steps.get(key, ()) for run in runs]
    halves = [[value for value in column[len(column) // 2 :] if value is not None] for column in columns]
    means = [statistics.fmean(half) for half in halves if half]
    return statistics.fmean(means) if means else None
