"""Trains the embedded task with every algorithm of `conf/algo/`. Writes a table of accuracy before and after, and a figure.

python benchmarks/algorithms.py       # all, 40 steps, seeds 0, 1, 2; writes algorithms.md and .svg in benchmarks/results/
python benchmarks/algorithms.py --algos rloo opo --seeds 3 --out /tmp/algorithms.md -- run.steps=80
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from learning import ROOT, Run, train

from tandem.launch.compose.compose import config_groups
from tandem.platform.system.terminal import say

SEEDS = [0, 1, 2]
SHORT = ["run.steps=40", "cluster=inline", "rollout.samples_per_prompt=8"]
ENOUGH = ["critic.warmup_steps=5"]
"""VAPO's 50 steps of critic warmup do not fit into 40 steps."""


def overrides_of(algo: str) -> list[str]:
    """The settings of a short run besides `algo=`."""
    return SHORT + (ENOUGH if algo == "vapo" else [])


def row(algo: str, runs: list[Run]) -> str:
    """A line of the table: one algorithm, all seeds."""
    before = statistics.mean(run.before_and_after()[0] for run in runs)
    after = [run.before_and_after()[1] for run in runs]
    sampled, trained = (
        statistics.mean(sum(step.get(f"samples/{kind}") or 0 for step in run.steps) for run in runs)
        for kind in ("sampled", "trained")
    )
    cells = [algo, f"{before:.3f}", " ".join(f"{value:.3f}" for value in after), f"{statistics.mean(after):.3f}"]
    return f"| {' | '.join(cells)} | {sampled:,.0f} | {trained:,.0f} |"


def figure(runs: dict[str, list[Run]], path: Path) -> None:
    """Draws accuracy before and after training: a line per algorithm, a dot per seed."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "tandem"
    picture, axes = pyplot.subplots(figsize=(7, 0.35 * len(runs) + 1))
    names = sorted(runs, key=lambda name: statistics.mean(run.before_and_after()[1] for run in runs[name]))
    for place, name in enumerate(names):
        before = runs[name][0].before_and_after()[0]
        after = [run.before_and_after()[1] for run in runs[name]]
        axes.plot([before, statistics.mean(after)], [place, place], color="#0072b2", linewidth=2)
        axes.plot([before], [place], "|", color="black", markersize=10)
        axes.plot(after, [place] * len(after), "o", color="#d55e00", alpha=0.7)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="held-out greedy accuracy, before (bar) and after (a dot per seed)", xlim=(0.4, 1.0))
    axes.grid(alpha=0.3, axis="x")
    picture.tight_layout()
    picture.savefig(path, metadata={"Date": None})


def main() -> None:
    """Runs the grid and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", nargs="+", default=config_groups()["algo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "algorithms.md")
    parser.add_argument("overrides", nargs="*", help="settings for every run, after --")
    options = parser.parse_args()
    more = f" -- {' '.join(options.overrides)}" if options.overrides else ""
    lines = [
        "# Every algorithm on the embedded task",
        "",
        f"Printed by `python benchmarks/algorithms.py{more}`, seeds {', '.join(map(str, options.seeds))}; "
        f"`{' '.join(SHORT)}`,",
        f"for vapo also `{' '.join(ENOUGH)}`. Greedy accuracy on 256 held-out sums before training, after it for each",
        "seed, and the mean; samples drawn and trained on. One task and one learning rate for all: this shows that each",
        "learns, not which is best.",
        "",
        "| algo | before | after, by seed | mean | sampled | trained |",
        "|---|---|---|---|---|---|",
    ]
    runs: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for algo in options.algos:
            overrides = [*overrides_of(algo), *options.overrides]
            runs[algo] = [train(algo, seed, Path(folder), overrides) for seed in options.seeds]
            lines.append(row(algo, runs[algo]))
            say(lines[-1])
    options.out.write_text("\n".join(lines) + "\n")
    figure(runs, options.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
