"""Trains the embedded task with each algorithm and seed, and prints a table: accuracy before and after, seconds.

python benchmarks/learning.py                       # ppo and grpo, seeds 0, 1, 2; writes benchmarks/results/learning.md
python benchmarks/learning.py --algos ppo --seeds 3 -- run.steps=100
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def train(algo: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One run by the command users type; returns its summary."""
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
    summary: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return summary


def row(algo: str, seed: int, summary: dict[str, Any]) -> str:
    """A line of the table."""
    first, last = (summary[key]["eval/addition/greedy"] for key in ("eval_first", "eval_last"))
    return (
        f"| {algo} | {seed} | {summary['steps']} | {first:.3f} | {last:.3f} "
        f"| {summary['time/startup_s']:.0f} | {summary['time/total_s']:.0f} |"
    )


def main() -> None:
    """Runs the grid and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algos", nargs="+", default=["ppo", "grpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "learning.md")
    parser.add_argument("overrides", nargs="*", help="settings for every run, after --")
    options = parser.parse_args()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "ray", "deepspeed"))
    lines = [
        "# Learning on the embedded task",
        "",
        f"Printed by `python benchmarks/learning.py {' '.join(sys.argv[1:])}`".rstrip("` ") + "`, "
        f"on {len(os.sched_getaffinity(0))} cores; {versions}.",
        "",
        "Greedy accuracy on 256 held-out sums, before and after training; seconds from the command to the end of the first",
        "optimizer step, and in all.",
        "",
        "| algo | seed | steps | before | after | startup s | total s |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for algo in options.algos:
            for seed in options.seeds:
                lines.append(row(algo, seed, train(algo, seed, Path(folder), options.overrides)))
                print(lines[-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
