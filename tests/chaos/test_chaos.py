"""Workers are hurt in the middle of runs: what comes of it, and how soon.

`pytest tests/chaos -m slow` tries every role in the phases that use it; `--everywhere` tries every role in every phase. A
table of (role, phase) -> outcome and seconds is printed at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

BOUND_S = 60
ENDS, GOES_ON = "failed", "finished"
ROLES = {"actor": ENDS, "critic": ENDS, "reference": ENDS, "reward": GOES_ON, "rollout": GOES_ON}
PHASES = ("generate", "score", "infer", "update", "publish")
WHERE_USED = [
    ("actor", "update"),
    ("actor", "publish"),
    ("critic", "infer"),
    ("reference", "infer"),
    ("reward", "score"),
    ("rollout", "generate"),
    ("rollout", "publish"),
]


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    code: int
    status: str
    error: str
    seconds: float  # from the attack to the end of the process
    steps: list[dict[str, float]]
    orphans: list[str]


def attack(path: str, folder: Path, role: str, phase: str, how: str = "kill", *more: str, step: int = 2) -> Outcome:
    """A run of three steps with every role, one of them hurt in one of the steps."""
    name = f"{role}-{phase}-{how}"
    overrides = [
        *(
            "algo=ppo",
            "algo.kl_loss_coef=0.01",
            f"model.path={path}",
            f"run.dir={folder}",
            f"run.name={name}",
            "run.steps=3",
        ),
        *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=4", "task.eval_size=4"),
        *("critic.warmup_steps=0", "eval.before_training=false", "cluster.num_cpus=2", "cluster.call_timeout_s=40", *more),
    ]
    plan = {
        "role": role if role == "head" else f"{role}-0",
        "phase": phase,
        "step": step,
        "how": how,
        "overrides": overrides,
    }
    command = [sys.executable, str(Path(__file__).parent / "victim.py"), json.dumps(plan)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    family: dict[int, psutil.Process] = {}
    while process.poll() is None:
        try:
            family |= {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        time.sleep(0.5)
    output, errors = process.communicate()
    ended = time.time()
    hurt = [float(line.split()[1]) for line in output.splitlines() if line.startswith("hurt")]
    assert len(hurt) == 1, f"the attack did not happen:\n{output}\n{errors}"
    summary = json.loads((folder / name / "summary.json").read_text())
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    psutil.wait_procs(list(family.values()), timeout=5)
    orphans = [child.name() for child in family.values() if child.is_running() and child.name().startswith("ray::")]
    steps = [json.loads(line) for line in lines]
    return Outcome(process.returncode, summary["status"], summary["error"] or "", ended - hurt[0], steps, orphans)


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, str, str, float]]]:
    """Rows of (role, phase, outcome, seconds), printed at the end."""
    rows: list[tuple[str, str, str, float]] = []
    yield rows
    print("\n\nrole        phase      outcome    seconds", file=sys.__stderr__)
    for role, phase, outcome, seconds in rows:
        print(f"{role:<11} {phase:<10} {outcome:<10} {seconds:6.1f}", file=sys.__stderr__)


def combinations(config: pytest.Config) -> list[tuple[str, str]]:
    everywhere = [(role, phase) for role in ROLES for phase in PHASES]
    return everywhere if config.getoption("--everywhere", default=False) else WHERE_USED


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"role", "phase"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("role", "phase"), combinations(metafunc.config))


def test_a_killed_worker(
    tiny_path: str, tmp_path: Path, table: list[tuple[str, str, str, float]], role: str, phase: str
) -> None:
    outcome = attack(tiny_path, tmp_path, role, phase)
    table.append((role, phase, outcome.status, outcome.seconds))
    assert outcome.status == ROLES[role], outcome.error
    assert (outcome.code == 0) == (ROLES[role] == GOES_ON)
    assert outcome.seconds < BOUND_S
    assert outcome.orphans == []
    if ROLES[role] == ENDS:
        assert "WorkerDied" in outcome.error or "WorkerFailed" in outcome.error
        assert f"{role} rank 0 on node" in outcome.error
        assert "step 2, phase" in outcome.error
        assert len(outcome.steps) == 1  # what was done before is kept
        return
    assert [step["step"] for step in outcome.steps] == [1, 2, 3]
    for step in outcome.steps:
        assert step["samples/sampled"] == 8
        assert step["samples/trained"] + step["samples/filtered"] == 8
    assert outcome.steps[-1][f"restarts/{role}"] == 1


def test_a_worker_that_hangs_shows_where(tiny_path: str, tmp_path: Path) -> None:
    outcome = attack(tiny_path, tmp_path, "critic", "update", "hang", "cluster.call_timeout_s=10")
    assert outcome.status == ENDS
    assert outcome.seconds < BOUND_S
    assert "critic rank 0" in outcome.error
    assert "did not finish `update` within 10 s" in outcome.error
    assert "in hang" in outcome.error  # the stack it stands in


def test_a_worker_without_memory_is_named(tiny_path: str, tmp_path: Path) -> None:
    large = ["data.prompts_per_step=64", "rollout.samples_per_prompt=8", "rollout.max_response_tokens=60"]
    whole = "train.max_tokens_per_microbatch=100000"
    # In the first step: later ones could use again what the process has kept.
    outcome = attack(tiny_path, tmp_path, "actor", "update", "memory", *large, whole, step=1)
    assert outcome.status == ENDS
    assert outcome.seconds < BOUND_S
    assert "actor rank 0" in outcome.error


def test_no_restart_is_left(tiny_path: str, tmp_path: Path) -> None:
    outcome = attack(tiny_path, tmp_path, "rollout", "generate", "kill", "cluster.max_restarts=0")
    assert outcome.status == ENDS
    assert "cluster.max_restarts=0" in outcome.error


def test_rays_head_gone(tiny_path: str, tmp_path: Path) -> None:
    outcome = attack(tiny_path, tmp_path, "head", "update")
    assert (outcome.code, outcome.status) == (1, ENDS)
    assert outcome.seconds < BOUND_S
    assert "Ray's head" in outcome.error
    assert outcome.orphans == []
