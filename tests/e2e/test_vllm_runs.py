"""Runs that sample with vLLM, alongside the other roles on real Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Heads have 32 dimensions, the smallest size that vLLM supports on a CPU. The policy earns no reward, so an entropy bonus
# changes it.
SMALL = (
    "model.warmstart.steps=0",
    "model.tiny.hidden_size=64",
    "model.tiny.intermediate_size=64",
    "model.tiny.layers=2",
    "model.tiny.heads=2",
    "data.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.kv_cache_gb=0.0625",
    "task.eval_size=8",
    "eval.every=0",
    "algo.entropy_coef=1",
    "actor.lr=0.01",
)


def run(repo: Path, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repo / "launch" / "main.py"), *SMALL, *overrides, f"run.dir={folder}", "run.name=r"]
    # Fewer threads than Ray gives the replica; every computing thread must use this limit.
    environment = {**os.environ, "TANDEM_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=repo, env=environment)


def test_vllm_samples_from_the_weights_that_are_trained(repo: Path, tmp_path: Path) -> None:
    done = run(repo, tmp_path, "algo=grpo", "rollout=vllm", "run.steps=3")
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert all(step["rollout/logprob_gap"] < 1e-3 for step in steps[1:])
    # The policy has changed by more than the tolerance of the gap, so missing weights would have been noticed.
    assert abs(steps[3]["policy/entropy"] - steps[1]["policy/entropy"]) > 0.01
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["peak_memory_bytes"]["rollout"] < 3 * 2**30


def test_a_model_that_vllm_cannot_run_here_is_refused_in_words(repo: Path, tmp_path: Path) -> None:
    done = run(repo, tmp_path, "algo=grpo", "rollout=vllm", "cluster=inline", "run.steps=1", "model.tiny.heads=4")
    assert done.returncode == 1
    assert "needs attention heads of 32, 64" in done.stderr
    assert "this model's have 16. Set rollout.engine=hf" in done.stderr
    assert "Traceback" not in done.stderr
