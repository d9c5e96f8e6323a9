"""The defaults, except for the number of steps, learn the embedded task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_held_out_accuracy_rises(repo: Path, tmp_path: Path) -> None:
    """Trains on Ray, with a critic; test_every_algorithm.py tests every algorithm in one process."""
    command = [sys.executable, "launch/main.py", "algo=ppo", "run.steps=20", "run.name=learned", f"run.dir={tmp_path}"]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "learned" / "summary.json").read_text())
    before, after = (summary[key]["eval/addition/greedy"] for key in ("eval_first", "eval_last"))
    assert before <= 0.6
    assert after >= 0.65
    metrics = [json.loads(line) for line in (tmp_path / "learned" / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward/mean"] for record in metrics if "reward/mean" in record]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.3
