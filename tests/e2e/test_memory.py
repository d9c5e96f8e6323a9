"""The memory of a long run does not grow."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

STEPS, SETTLED, MOST, SMALL = 200, 50, 0.02, 1.5 * 2**20


def test_no_process_grows_over_many_steps(tiny_path: str, repo: Path, tmp_path: Path) -> None:
    """Between step 50 and the end, no process of a run with all roles grows by more than 2 % in resident memory.

    A small process may grow by up to 1.5 MiB: Ray's raylet, with 11 MiB, grows by 1 MiB.
    """
    overrides = [
        *("algo=ppo", "algo.kl_loss_coef=0.01", f"model.path={tiny_path}", f"run.steps={STEPS}", f"run.dir={tmp_path}"),
        *("run.name=r", "data.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=4"),
        *("task.eval_size=2", "eval.every=10", "checkpoint.every=10", "tracking.samples_every=10", "cluster.num_cpus=2"),
    ]
    process = subprocess.Popen([sys.executable, "launch/main.py", *overrides], cwd=repo, stdout=subprocess.DEVNULL)
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    records = tmp_path / "r" / "metrics.jsonl"
    while process.poll() is None:
        step = records.read_text().count("\n") if records.exists() else 0
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            try:
                # Shared memory is Ray's object store, which is bounded as a whole.
                memory = one.memory_info()
                seen[f"{one.pid} {' '.join(one.cmdline())[:70]}"].append((step, memory.rss - memory.shared))
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.3)
    assert process.returncode == 0
    grown = {}
    for name, sizes in seen.items():
        early = [size for step, size in sizes if SETTLED <= step < SETTLED + 15]
        late = [size for step, size in sizes if step >= STEPS - 15]
        if early and late:
            grown[name] = statistics.median(late) - statistics.median(early), statistics.median(early)
    assert len(grown) > 5
    assert {name: both for name, both in grown.items() if both[0] > max(MOST * both[1], SMALL)} == {}
