"""A run that runs out of memory says which setting to change, and the change works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SETTINGS = ["algo=grpo", "cluster=inline", "run.steps=1", "model.warmstart.steps=0", "task.eval_size=1"]
SETTINGS += [
    "eval.before_training=false",
    "data.prompts_per_step=32",
    "data.max_prompt_tokens=8",
    "rollout.max_response_tokens=40",
    "checkpoint.every=0",
    "tracking.console=none",
]
SPACE = 640 << 20
"""Bytes of address space that the run may add; a micro-batch of about 17,000 tokens needs half as much again."""
CHILD = f"""
import resource, sys
import deepspeed, psutil, torch, transformers.models.qwen2.modeling_qwen2
import tandem.launch.assembly.run, tandem.workers.models.tiny
from tandem.launch.main import main
if sys.argv[1] == "limited":
    space = psutil.Process().memory_info().vms + {SPACE}
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
sys.exit(main(sys.argv[2:]))
"""


def run(folder: Path, name: str, *more: str) -> tuple[int, dict[str, object], str]:
    """The exit code, summary and settings of a run in a process with little memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", CHILD, "limited", *SETTINGS, f"run.dir={folder}", f"run.name={name}", *more]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (folder / name / "summary.json").exists(), done.stdout + done.stderr
    return (
        done.returncode,
        json.loads((folder / name / "summary.json").read_text()),
        (folder / name / "config.yaml").read_text(),
    )


def test_what_is_advised_fits(tmp_path: Path) -> None:
    """A value that is too large fails with a smaller one as advice; by default the plan chooses that value."""
    code, summary, _ = run(tmp_path, "large", "train.max_tokens_per_microbatch=1000000")
    error = str(summary["error"])
    assert code == 1
    assert "can't allocate memory" in error
    [advised] = re.findall(r"Set train\.max_tokens_per_microbatch=(\d+) \(was 1000000\)", error)
    assert 48 <= int(advised) < 17000
    code, summary, settings = run(tmp_path, "alone")
    assert (code, summary["status"]) == (0, "finished"), summary
    assert f"max_tokens_per_microbatch: {advised}\n" in settings
