"""Trains the embedded task with each algorithm and seed. Writes a table of accuracy, seconds and critic cost, and a figure.

python benchmarks/learning.py         # ppo and grpo, seeds 0, 1, 2; writes learning.md and .svg in benchmarks/results/
python benchmarks/learning.py --algos ppo --seeds 3 --out /tmp/learning.md -- run.steps=100

The figure needs matplotlib, which the extra `dev` installs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tandem.platform.records.recorder import Record, Summary, read_metrics, read_summary
from tandem.platform.system.terminal import say

ROOT = Path(__file__).resolve().parent.parent
ALGOS, SEEDS = ["ppo", "grpo"], [0, 1, 2]
ACCURACY = "eval/addition/greedy"
STYLES = {"ppo": "-o", "grpo": "--s"}


@dataclass(frozen=True)
class Run:
    """The records of one run."""

    algo: str
    seed: int
    summary: Summary
    steps: list[Record]

    def accuracy(self) -> list[tuple[int, float]]:
        """(step, greedy accuracy) of every evaluation."""
        return [(int(step["step"] or 0), step[ACCURACY] or 0.0) for step in self.steps if ACCURACY in step]

    def before_and_after(self) -> tuple[float, float]:
        """Greedy accuracy of the first and the last evaluation."""
        return self.accuracy()[0][1], self.accuracy()[-1][1]

    def median(self, *keys: str) -> float:
        """Median over training steps, without the first ten, of the sum of the metrics `keys`."""
        return statistics.median(
            sum(step.get(key) or 0.0 for key in keys) for step in self.steps if (step["step"] or 0) > 10
        )


def train(algo: str, seed: int, folder: Path, overrides: list[str]) -> Run:
    """Runs the training command as a user would."""
    name = f"{algo}-{seed}"
    command = [
        sys.executable,
        "launch/main.py",
        f"algo={algo}",
        f"run.seed={seed}",
        f"run.name={name}",
        f"run.dir={folder}",
    ]
    subprocess.run([*command, *overrides], cwd=ROOT, check=True)
    return Run(algo, seed, read_summary(folder / name), read_metrics(folder / name))


def row(run: Run) -> str:
    """A line of the table."""
    first, last = run.before_and_after()
    critic = run.median("time/infer_values_s", "time/update_critic_s") / run.median("time/step_s")
    kinds = ("weights", "gradients", "optimizer")
    itemised = (run.steps[-1].get(f"memory/critic/{kind}_bytes") or 0 for kind in kinds)
    startup, total = run.summary.startup_s or 0, run.summary.total_s or 0
    return (
        f"| {run.algo} | {run.seed} | {run.summary.steps} | {first:.3f} | {last:.3f} "
        f"| {startup:.0f} | {total:.0f} | {critic:.0%} | {sum(itemised) / 2**20:.1f} |"
    )


def figure(runs: list[Run], path: Path) -> None:
    """Draws accuracy by training step: a thin line per seed, a thick line for the mean."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "tandem"
    picture, axes = pyplot.subplots(figsize=(7, 3.6))
    for (algo, style), colour in zip(STYLES.items(), ("#0072b2", "#d55e00"), strict=True):
        curves = [run.accuracy() for run in runs if run.algo == algo]
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), style, color=colour, alpha=0.3, linewidth=1)
        if curves:
            by_step = list(zip(*curves, strict=True))
            means = [(points[0][0], statistics.mean(value for _, value in points)) for points in by_step]
            axes.plot(
                *zip(*means, strict=True), style, color=colour, linewidth=2.5, label=f"{algo}, mean of {len(curves)} seeds"
            )
    axes.set(xlabel="training step (256 samples each)", ylabel="held-out greedy accuracy", ylim=(0.4, 1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    picture.tight_layout()
    picture.savefig(path, metadata={"Date": None})


def _chosen(options: argparse.Namespace) -> list[str]:
    """The part of the command line that changes the numbers."""
    words = [] if options.algos == ALGOS else ["--algos", *options.algos]
    words += [] if options.seeds == SEEDS else ["--seeds", *map(str, options.seeds)]
    return words + (["--", *options.overrides] if options.overrides else [])


def main() -> None:
    """Runs the grid and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", nargs="+", default=ALGOS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "learning.md")
    parser.add_argument("overrides", nargs="*", help="settings for every run, after --")
    options = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "ray", "deepspeed"))
    lines = [
        "# Learning on the embedded task",
        "",
        f"Printed by `python benchmarks/learning.py{''.join(f' {word}' for word in _chosen(options))}`, "
        f"on {len(os.sched_getaffinity(0))} cores; {versions}.",
        "",
        "Greedy accuracy on 256 held-out sums, before and after training; seconds from the command to the end of the first",
        "optimizer step, and in all; the critic's share of a step (`time/infer_values_s + time/update_critic_s` over",
        "`time/step_s`, medians) and its weights, gradients and optimizer state.",
        "",
        "| algo | seed | steps | before | after | startup s | total s | critic, of a step | critic, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        for algo in options.algos:
            for seed in options.seeds:
                runs.append(train(algo, seed, Path(folder), options.overrides))
                lines.append(row(runs[-1]))
                say(lines[-1])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n")
    figure(runs, options.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
