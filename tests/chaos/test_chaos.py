"""Injects worker failures into runs, and checks the outcome and its delay.

`pytest tests/chaos` tries each kind of failure once; `--everywhere` also kills every role in every phase. Prints a table of
(role, phase) -> outcome and seconds at the end.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tandem.launch.storage.checkpoints import Checkpoints

pytestmark = pytest.mark.slow

BOUND_S = 60
ENDS, GOES_ON = "failed", "finished"
ROLES = {"actor": ENDS, "critic": ENDS, "reference": ENDS, "reward": GOES_ON, "rollout": GOES_ON}
PHASES = ("generate", "score", "infer", "update", "publish")
Table = list[tuple[str, str, str, float]]
"""Rows of role, phase, outcome, and seconds from the last attack to the end of the run."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    pid: int
    code: int
    status: str
    error: str
    seconds: float  # from the last attack to the end of the process
    steps: list[dict[str, float]]
    orphans: list[str]
    checkpoint: int | None  # step of the newest complete checkpoint


def attack(path: str, folder: Path, attacks: list[tuple[str, str, int, str]], *more: str, steps: int = 3) -> Outcome:
    """Runs a few steps with every role; each attack is (role and rank, phase, step, how)."""
    overrides = [
        *("algo=ppo", "algo.kl_loss_coef=0.01", f"model.path={path}", f"run.dir={folder}", "run.name=r"),
        *(f"run.steps={steps}", "data.prompts_per_step=4", "rollout.samples_per_prompt=2"),
        *(
            "rollout.max_response_tokens=4",
            "task.eval_size=4",
            "eval.before_training=false",
            "eval.every=0",
            "checkpoint.every=1",
        ),
        *("cluster.num_cpus=2", "cluster.call_timeout_s=40", *more),
    ]
    keys = ("role", "phase", "step", "how")
    plan = {"attacks": [dict(zip(keys, one, strict=True)) for one in attacks], "overrides": overrides}
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
    hurt = [float(seconds) for seconds in re.findall(r"^hurt (\d+\.\d+)$", output, re.MULTILINE)]
    assert len(hurt) == len(attacks), f"an attack did not happen:\n{output}\n{errors}"
    summary = json.loads((folder / "r" / "summary.json").read_text())
    lines = (folder / "r" / "metrics.jsonl").read_text().splitlines()
    _, alive = psutil.wait_procs(list(family.values()), timeout=60)
    return Outcome(
        process.pid,
        process.returncode,
        summary["status"],
        summary["error"] or "",
        ended - hurt[-1],
        [json.loads(line) for line in lines],
        [child.name() for child in alive],
        found.step if (found := Checkpoints(str(folder / "r" / "checkpoints"), keep=1).find("auto", print)) else None,
    )


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """The rows that the tests add, printed at the end."""
    rows: Table = []
    yield rows
    print("\n\nrole        phase      outcome    seconds", file=sys.__stderr__)
    for role, phase, outcome, seconds in rows:
        print(f"{role:<11} {phase:<10} {outcome:<10} {seconds:6.1f}", file=sys.__stderr__)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"role", "phase"} <= set(metafunc.fixturenames):
        everywhere = [(role, phase) for role in ROLES for phase in PHASES]
        chosen = everywhere if metafunc.config.getoption("--everywhere", default=False) else [("critic", "infer")]
        metafunc.parametrize(("role", "phase"), chosen)


def check_ended(outcome: Outcome, who: str, done: int = 1) -> None:
    """Checks that the run ended in time, named the worker, and kept its records."""
    assert (outcome.code, outcome.status) == (1, ENDS), outcome.error
    assert outcome.seconds < BOUND_S
    assert outcome.orphans == []
    assert outcome.error.startswith(f"WorkerFailed: step {done + 1}, phase "), outcome.error
    assert f"{who} on node" in outcome.error
    assert len(outcome.steps) == done
    assert outcome.checkpoint == (done or None)  # the last checkpoint is complete


def check_went_on(outcome: Outcome, steps: int) -> None:
    """Checks that all steps were done, with every sample once."""
    assert (outcome.code, outcome.status) == (0, GOES_ON), outcome.error
    assert outcome.orphans == []
    assert [step["step"] for step in outcome.steps] == list(range(1, steps + 1))
    for step in outcome.steps:
        assert step["samples/sampled"] == 8
        assert step["samples/trained"] + step["samples/filtered"] == 8
        assert step["rollout/logprob_gap"] < 1e-4  # every replica sampled with the current weights


def test_a_killed_worker(tiny_path: str, tmp_path: Path, table: Table, role: str, phase: str) -> None:
    outcome = attack(tiny_path, tmp_path, [(f"{role}-0", phase, 2, "kill")])
    table.append((role, phase, outcome.status, outcome.seconds))
    if ROLES[role] == ENDS:
        check_ended(outcome, f"{role} rank 0")
        assert "killed" in outcome.error
    else:
        check_went_on(outcome, 3)
        assert outcome.seconds < BOUND_S
        assert outcome.steps[-1][f"restarts/{role}"] == 1


def test_of_two_ranks_the_one_that_died_is_named(tiny_path: str, tmp_path: Path, table: Table) -> None:
    """The other rank fails in the collective because of it, perhaps earlier."""
    outcome = attack(tiny_path, tmp_path, [("actor-1", "update", 2, "kill")], "actor.ranks=2", "algo=grpo")
    table.append(("actor 1/2", "update", outcome.status, outcome.seconds))
    check_ended(outcome, "actor rank 1")
    assert "killed" in outcome.error


def test_one_after_the_other_is_replaced(tiny_path: str, tmp_path: Path, table: Table) -> None:
    """Also both replicas at once, and in `publish`, where a broadcast loses an end."""
    two = ["rollout.replicas=2", "trainer.weight_transport=broadcast"]
    at_once = [("rollout-0", "generate", 3, "kill"), ("rollout-1", "generate", 3, "kill")]
    attacks = [("reward-0", "score", 2, "kill"), *at_once, ("rollout-new", "publish", 4, "kill")]
    outcome = attack(tiny_path, tmp_path, attacks, *two, steps=5)
    table.append(("four", "in turn", outcome.status, outcome.seconds))
    check_went_on(outcome, 5)
    assert (outcome.steps[-1]["restarts/rollout"], outcome.steps[-1]["restarts/reward"]) == (3, 1)


def test_a_worker_that_hangs_shows_where(tiny_path: str, tmp_path: Path, table: Table) -> None:
    outcome = attack(tiny_path, tmp_path, [("critic-0", "update", 2, "hang")], "cluster.call_timeout_s=10")
    table.append(("critic", "hangs", outcome.status, outcome.seconds))
    check_ended(outcome, "critic rank 0")
    assert "did not finish `update` within 10 s" in outcome.error
    assert "in hang" in outcome.error  # from the worker's stack


def test_a_worker_without_memory_is_named(tiny_path: str, tmp_path: Path, table: Table) -> None:
    large = ["data.prompts_per_step=64", "rollout.samples_per_prompt=8", "rollout.max_response_tokens=60"]
    whole = "train.max_tokens_per_microbatch=100000"
    # Attack the first step: in a later step, the process could reuse memory that it has already allocated.
    outcome = attack(tiny_path, tmp_path, [("actor-0", "update", 1, "memory")], *large, whole, "algo=grpo")
    table.append(("actor", "memory", outcome.status, outcome.seconds))
    check_ended(outcome, "actor rank 0", done=0)


@pytest.mark.parametrize(("server", "said"), [("head", "Ray's head is gone"), ("raylet", "Ray's node process (raylet)")])
def test_ray_itself_gone(tiny_path: str, tmp_path: Path, table: Table, server: str, said: str) -> None:
    outcome = attack(tiny_path, tmp_path, [(server, "update", 2, "kill")], "algo=grpo")
    table.append((f"Ray's {server}", "update", outcome.status, outcome.seconds))
    assert (outcome.code, outcome.status) == (1, ENDS)
    assert outcome.seconds < BOUND_S
    assert outcome.error.startswith(said)
    assert outcome.orphans == []
    assert list(Path("/tmp").glob(f"tandem-*/r/session_*_{outcome.pid}")) == []
