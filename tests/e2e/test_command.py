"""The command as users type it: real Ray, real DeepSpeed, real processes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

QUICK = (
    "model.warmstart.steps=0",
    "model.tiny.hidden_size=32",
    "model.tiny.intermediate_size=64",
    "model.tiny.layers=2",
    "data.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "task.eval_size=8",
    "eval.every=0",
)


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.getbasetemp() / "tandem-cache")


def command(repo: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(repo / "launch" / "main.py"), *QUICK, *overrides]


def environment(cache: str) -> dict[str, str]:
    return {**os.environ, "TANDEM_CACHE": cache}


def run(repo: Path, cache: str, *overrides: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(repo, *overrides), capture_output=True, text=True, timeout=timeout, cwd=repo, env=environment(cache)
    )


def records(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return metrics, json.loads((folder / "summary.json").read_text())


# A random model earns no reward, so an entropy bonus changes the policy here.
PPO = ("algo=ppo", "run.steps=2", "algo.kl_loss_coef=0.01", "algo.entropy_coef=0.1", "placement.threads_per_rank=1")


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two steps of PPO on Ray, with every role."""
    place = tmp_path_factory.mktemp("ppo")
    cache = str(tmp_path_factory.getbasetemp() / "tandem-cache")
    done = run(Path(__file__).resolve().parents[2], cache, *PPO, "run.name=a", f"run.dir={place}")
    assert done.returncode == 0, done.stderr
    return place / "a"


def test_ppo_leaves_its_records(ppo: Path) -> None:
    metrics, summary = records(ppo)
    assert [record["step"] for record in metrics] == [0, 1, 2]
    assert "eval/addition/greedy" in metrics[0]
    assert "eval/addition/greedy" in metrics[2]
    first, last = metrics[1], metrics[2]
    assert first["policy/kl"] < 1e-6  # the reference is the initial policy
    assert last["policy/kl"] > 0
    assert first["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert first["rollout/logprob_gap"] < 1e-4
    assert first["samples/sampled"] == first["samples/trained"] + first["samples/filtered"] == 16
    for role in ("actor", "critic"):
        assert first[f"memory/{role}/weights_bytes"] > 0
        assert first[f"time/update_{role}_s"] > 0
    phases = sum(first[f"time/{name}_s"] for name in ("generate", "score", "infer", "credit", "update", "publish"))
    assert phases == pytest.approx(first["time/step_s"], rel=0.03)
    assert summary["status"] == "finished"
    assert summary["steps"] == 2
    assert 0 < summary["time/startup_s"] < summary["time/total_s"]
    assert set(summary["peak_memory_bytes"]) == {"actor", "critic", "reference", "reward", "rollout"}
    assert summary["eval_first"]["step"] == 0
    assert summary["eval_last"]["step"] == 2
    assert json.loads((ppo / "versions.json").read_text())["ray"]
    assert "adv_estimator: gae" in (ppo / "config.yaml").read_text()
    [row, *_] = (ppo / "samples" / "step-000001.jsonl").read_text().splitlines()
    assert {"prompt", "response", "reward", "advantage"} <= set(json.loads(row))


def test_a_folder_with_a_run_is_not_written_over(repo: Path, cache: str, ppo: Path) -> None:
    before = (ppo / "metrics.jsonl").read_text()
    again = run(repo, cache, "run.steps=1", "run.name=a", f"run.dir={ppo.parent}", "checkpoint.resume=never")
    assert again.returncode == 2
    assert "holds a run already" in again.stderr
    assert (ppo / "metrics.jsonl").read_text() == before


def test_inline_and_ray_give_the_same_numbers(repo: Path, cache: str, ppo: Path, tmp_path: Path) -> None:
    """One process and Ray actors give the same samples, losses and evaluations."""
    done = run(repo, cache, *PPO, "cluster=inline", "run.name=inline", f"run.dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    compared = [
        *("reward/mean", "response/length_mean", "policy/loss", "policy/entropy", "policy/grad_norm", "tokens/response"),
        *("critic/loss", "policy/kl"),
    ]
    for inline, local in zip(records(tmp_path / "inline")[0][1:], records(ppo)[0][1:], strict=True):
        for name in compared:
            assert inline[name] == pytest.approx(local[name], rel=1e-3, abs=1e-6), name


def test_two_runs_at_once_with_two_ranks_each(repo: Path, cache: str, tmp_path: Path) -> None:
    overrides = ("algo=grpo", "run.steps=1", "actor.ranks=2", f"run.dir={tmp_path}", "trainer.zero_stage=2")
    running = [
        subprocess.Popen(
            command(repo, f"run.name={name}", *overrides),
            cwd=repo,
            env=environment(cache),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for name in ("one", "two")
    ]
    for process in running:
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors.decode()
    one, two = (records(tmp_path / name)[0] for name in ("one", "two"))
    assert not any(name.startswith(("critic/", "memory/critic")) for name in one[1])
    assert one[1]["policy/loss"] == pytest.approx(two[1]["policy/loss"], rel=1e-4)


Starter = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(repo: Path, cache: str) -> Iterator[Starter]:
    """Starts long runs, and ends those that a failed test leaves."""
    started: list[subprocess.Popen[str]] = []
    yield lambda folder, *overrides: start_and_wait_for(repo, cache, folder, started, *overrides)
    for process in started:
        if process.poll() is None:
            process.kill()


def heeds_signals() -> None:
    """Restores the default signal handlers: background shells ignore SIGINT, nohup ignores SIGHUP, and children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start_and_wait_for(
    repo: Path, cache: str, folder: Path, started: list[subprocess.Popen[str]], *overrides: str
) -> subprocess.Popen[str]:
    """Starts a long run; returns once its second step is recorded."""
    process = subprocess.Popen(
        command(repo, "run.steps=5000", f"run.dir={folder.parent}", f"run.name={folder.name}", *overrides),
        cwd=repo,
        env=environment(cache),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=heeds_signals,
    )
    started.append(process)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        path = folder / "metrics.jsonl"
        if path.exists() and len(path.read_text().splitlines()) >= 3:
            return process
        time.sleep(0.2)
    process.kill()
    raise AssertionError(f"no second step within the deadline: {process.communicate()[1]}")


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive, [process.cmdline() for process in alive]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143)])
def test_interruption_is_clean(start: Starter, tmp_path: Path, number: int, code: int) -> None:
    """A closed terminal also signals Ray's processes; they stay until the last step is saved."""
    process = start(tmp_path / "run", "algo=grpo")
    children = family(process)
    assert len(children) > 4
    tell = os.killpg if number == signal.SIGHUP else os.kill
    tell(process.pid, number)
    process.communicate(timeout=120)
    assert process.returncode == code
    metrics, summary = records(tmp_path / "run")
    assert summary["status"] == "interrupted"
    assert summary["steps"] == metrics[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{summary['steps']:06d}").is_dir()
    assert_gone(children)


@pytest.mark.parametrize(("seen", "number", "code"), [("gcs_server", signal.SIGINT, 130), ("Worker", signal.SIGTERM, 143)])
def test_signals_while_ray_starts_or_workers_load(
    repo: Path, cache: str, tmp_path: Path, seen: str, number: int, code: int
) -> None:
    """The first signal waits until Ray has started, the second until Ray has ended."""
    process = subprocess.Popen(
        command(repo, f"run.dir={tmp_path}", "run.name=run"),
        cwd=repo,
        env=environment(cache),
        preexec_fn=heeds_signals,
    )
    children: dict[int, psutil.Process] = {}
    signals = [number, number]
    due = math.inf
    while process.poll() is None:
        now = {child.pid: child for child in family(process)}
        children |= now
        for child in now.values():
            with contextlib.suppress(psutil.NoSuchProcess):  # the child has just ended
                if seen in child.name():
                    due = min(due, time.monotonic())
        if signals and time.monotonic() >= due:
            process.send_signal(signals.pop())
            due += 0.2
        time.sleep(0.05)
    assert signals == []
    assert process.returncode == code
    assert records(tmp_path / "run")[1]["status"] == "interrupted"
    assert_gone(list(children.values()))
    assert list(Path("/tmp").glob(f"tandem-*/r/session_*_{process.pid}")) == []


def test_a_killed_driver_leaves_records_and_nothing_else(start: Starter, tmp_path: Path) -> None:
    process = start(tmp_path / "run", "algo=grpo")
    children = family(process)
    process.kill()
    process.communicate(timeout=60)
    metrics, summary = records(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("failed", metrics[-1]["step"])
    assert "the run's process was killed" in summary["error"]
    assert_gone(children)
    assert list(Path("/tmp").glob(f"tandem-*/r/session_*_{process.pid}")) == []


def test_own_data_and_reward_function(repo: Path, cache: str, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n), "level": n}) + "\n" for n in range(9)))
    own = tmp_path / "own.py"
    own.write_text(
        "def short(sample):\n    print('seen', sample.metadata['level'])\n    return 1.0 / sample.response_tokens\n"
    )
    done = run(
        repo,
        cache,
        "algo=grpo",
        "run.steps=1",
        "run.name=own",
        f"run.dir={tmp_path}",
        f"data.train={data}",
        f"data.eval={data}",
        f"reward.function={own}:short",
        "reward.functions={last_number: 2.0}",
        "task.eval_size=256",
        "cluster=inline",
    )
    assert done.returncode == 0, done.stderr
    metrics, _ = records(tmp_path / "own")
    assert "eval/data/greedy" in metrics[0]
    parts = [name for name in metrics[1] if name.startswith("reward/") and ("short" in name or "last_number" in name)]
    assert len(parts) == 2
    assert "not read, since data.train" in done.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('digits')", "KeyError"),
        ("return [1.0, 2.0]", "list"),
        ("return float('inf')", "inf"),
    ],
)
def test_a_broken_reward_function_is_named(repo: Path, cache: str, tmp_path: Path, body: str, said: str) -> None:
    own = tmp_path / "own.py"
    own.write_text(f"def mine(sample):\n    {body}\n")
    done = run(repo, cache, "run.steps=1", "cluster=inline", f"run.dir={tmp_path}", f"reward.function={own}:mine")
    assert done.returncode == 1
    assert said in done.stderr
    assert "mine" in done.stderr
    assert "sample" in done.stderr
    assert "Traceback" not in done.stderr


def test_dead_address_is_an_error_in_seconds(repo: Path, cache: str, tmp_path: Path) -> None:
    started = time.monotonic()
    done = run(repo, cache, "cluster.address=127.0.0.1:1", f"run.dir={tmp_path}")
    assert done.returncode == 1
    assert "nothing answers there" in done.stderr
    assert time.monotonic() - started < 60


def test_a_joined_cluster_is_left_running(repo: Path, cache: str, tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        address = f"cluster.address={cluster.address}"
        done = run(repo, cache, "algo=grpo", "run.steps=1", "run.name=joined", f"run.dir={tmp_path}", address)
        assert done.returncode == 0, done.stderr
        too_many = run(repo, cache, "run.steps=1", f"run.dir={tmp_path}", address, "placement.cpus_per_bundle=8")
        assert too_many.returncode != 0
        assert "placement.cpus_per_bundle" in too_many.stderr
        assert all(process.process.poll() is None for process in head_processes(cluster))
    finally:
        cluster.shutdown()


def head_processes(cluster: Any) -> list[Any]:
    return [info for infos in cluster.head_node.all_processes.values() for info in infos]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algo.clip_ratio_hgih=.3"], "clip_ratio_high"),
        (["+algo.clip_ratio_hgih=.3"], "clip_ratio_high"),
        (["++algo.clip_ratio_hgih=.3"], "clip_ratio_high"),
        (["run.steps=two"], "run.steps"),
        (["adv_estimator=grpo", "critic.lr=1e-3"], "critic.lr"),
        (["algo=grpo", "rollout.samples_per_prompt=1"], "rollout.samples_per_prompt"),
        (["train.minibatches=5"], "4 or 8"),
        (["train.max_tokens_per_microbatch=2"], "train.max_tokens_per_microbatch"),
        (["data.train=missing.jsonl"], "missing.jsonl"),
    ],
)
def test_mistakes_are_refused_by_name(repo: Path, cache: str, tmp_path: Path, overrides: list[str], said: str) -> None:
    done = run(repo, cache, "run.steps=1", "cluster=inline", f"run.dir={tmp_path}", *overrides)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_fast_and_a_dry_run_starts_nothing(repo: Path, cache: str, tmp_path: Path) -> None:
    started = time.monotonic()
    shown = subprocess.run(
        [sys.executable, "launch/main.py", "--help"], capture_output=True, text=True, cwd=repo, check=True
    )
    assert "algo=ppo" in shown.stdout
    assert time.monotonic() - started < 2
    plan = run(repo, cache, "dry_run=true", "algo=grpo", f"run.dir={tmp_path}")
    assert plan.returncode == 0, plan.stderr
    for word in ("prompts per step", "optimizer steps", "micro-batches", "rollout", "actor", "bundle", "torch"):
        assert word in plan.stdout
    assert "critic" not in plan.stdout.replace("no critic", "")
    assert not any(tmp_path.iterdir())


PARTS = """
from tandem.platform.experience.batch import Credit

def mine(batch, values, algo):
    return Credit(3.0 * batch.response_mask.float())

def follow(logprobs, old_logprobs, advantages, mask, algo):
    return -5.0 * advantages + 0.0 * logprobs, mask & False
"""


@pytest.mark.parametrize(
    ("script", "overrides"),
    [
        ("main.py", ["cluster=inline", "run.steps=1", "checkpoint.every=0"]),
        ("main.py", ["cluster=local", "cluster.num_cpus=2", "run.steps=1", "checkpoint.every=0"]),
        ("evaluate.py", []),
    ],
)
def test_neighbours_of_a_reward_function_are_its_own(
    repo: Path, cache: str, tmp_path: Path, script: str, overrides: list[str]
) -> None:
    """A user's files are loaded by path: a reward function with the modules beside it, an estimator and an objective."""
    names = ["settings", "report", "evaluate", "run", "main", "resume", "roles", "export"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("MINE = 1.0\n")
    code = f"import {', '.join(names[:4])}\ndef score(sample):\n    import {', '.join(names[4:])}\n"
    (tmp_path / "reward.py").write_text(f"{code}    return min(one.MINE for one in [{', '.join(names)}])\n")
    (tmp_path / "parts.py").write_text(PARTS)
    if script == "main.py":
        overrides = [*overrides, f"adv_estimator={tmp_path}/parts.py:mine", f"algo.policy_loss={tmp_path}/parts.py:follow"]
    own = [f"reward.function={tmp_path}/reward.py:score", f"run.dir={tmp_path}/runs", "run.name=2024_01_05", *overrides]
    command_line = [sys.executable, str(repo / "launch" / script), *QUICK, "algo=grpo", *own]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=240, cwd=repo, env=environment(cache))
    assert done.returncode == 0, done.stderr
    if script == "main.py":
        metrics, _ = records(tmp_path / "runs" / "2024_01_05")
        assert metrics[-1]["reward/mean"] == 1.0
        assert metrics[-1]["advantage/mean"] == 3.0
        assert metrics[-1]["policy/loss"] == pytest.approx(-15.0)
