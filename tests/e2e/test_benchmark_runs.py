"""The benchmark command on the embedded task: two arms with one seed, and a seed that fails in both."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from in_browser import colours_on, look_at, screenshot

from tandem.launch.views.palette import COLOURS

pytestmark = pytest.mark.slow

NOTHING: dict[str, Any] = {"startup_s": None, "devices": None, "records": []}
ARGUMENTS = [
    *("arms=[ppo_4,grpo_4]", "seeds=[0,1]", "completions=32", "comparisons=[[ppo_4,grpo_4]]"),
    "definitions.ppo_4={label: 'PPO, G=4', algo: ppo, group: 4}",
    *("run.steps=5", "eval.every=5", "train.gradient_noise_every=2", "cluster=inline", "task.eval_size=32"),
    *("model.tiny.layers=2", "model.tiny.hidden_size=64", "model.tiny.heads=2", "model.warmstart.steps=0"),
]


def benchmark(repo: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/critic_vs_group.py", *arguments]
    return subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a benchmark that resumed after the runs of seed 1 were lost."""
    repo, folder = Path(__file__).resolve().parents[2], tmp_path_factory.mktemp("benchmark")
    from tandem.benchmarks.ab.arms import load_plan, make_arms
    from tandem.benchmarks.ab.runs import machine

    plan, given = load_plan(ARGUMENTS)
    (folder / "runs").mkdir()
    for arm in make_arms(plan, given):
        lost = {"arm": arm.name, "seed": 1, "status": "failed", "error": "lost", "settings": arm.settings, "identity": {}}
        text = json.dumps({**lost, **NOTHING, "machine": machine()}, default=str)
        (folder / "runs" / f"{arm.name}-seed1.json").write_text(text)
    done = benchmark(repo, *ARGUMENTS, f"out={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2/4  grpo_4 seed 0 finished" in done.stdout
    assert "seed 1" not in done.stdout  # these runs have a result already
    return folder


@pytest.fixture(scope="module")
def results(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "results.json").read_text()))


def test_runs_began_alike_and_their_ends_are_counted(results: dict[str, Any]) -> None:
    assert [run["status"] for run in results["runs"] if run["seed"] == 1] == ["failed", "failed"]
    ended = [run for run in results["runs"] if run["status"] == "finished"]
    assert len(ended) == 2
    assert ended[0]["identity"] == ended[1]["identity"]
    assert set(ended[0]["identity"]) == {"first_weights", "data"}
    assert results["derived"]["arms"]["grpo_4"]["errors"] == ["seed 1: lost"]


def test_phases_sum_to_the_step_within_three_percent(results: dict[str, Any]) -> None:
    for arm in results["derived"]["arms"].values():
        seconds = arm["costs"]["seconds"]
        assert 0 <= seconds["rest"] < 0.03 * seconds["step"]


def test_the_critic_is_what_its_tensors_say(results: dict[str, Any]) -> None:
    arms = results["derived"]["arms"]
    assert "critic" not in arms["grpo_4"]["memory"]
    assert 0.1 < arms["ppo_4"]["critic_share"]["value"] < 0.9
    actor, critic = (arms["ppo_4"]["memory"][role] for role in ("actor", "critic"))
    assert actor["weights"] == 4 * results["model"]["parameters"]
    assert critic["weights"] == actor["weights"] + 4 * (64 + 1)  # the actor's body and a value head
    assert critic["gradients"] == critic["weights"]


def test_budgets_are_those_of_the_runs(results: dict[str, Any]) -> None:
    budgets = results["derived"]["budgets"]
    assert (budgets["completions"], budgets["prompts"], budgets["updates"]) == (160, 40, 5)
    assert budgets["device_seconds"] == pytest.approx(budgets["seconds"] * results["machine"]["cores"])


def test_the_same_command_makes_no_run_again(out: Path, repo: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}
    done = benchmark(repo, *ARGUMENTS, f"out={out}")
    assert done.returncode == 0, done.stderr
    assert "seed" not in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")} == before


@pytest.mark.parametrize("width", [1440, 700])
def test_the_report_looks_right_in_a_browser(out: Path, tmp_path: Path, width: int) -> None:
    found = look_at(out / "report.html", tmp_path, width)
    assert found.faults == {"bad": [], "wide": False}
    assert found.text.count("<svg") >= 14
    assert not re.findall(r"""(?:src|href)="(?!#)|@import|url\((?!#)""", found.text)


def test_a_screenshot_of_the_report_built_again(out: Path, repo: Path, tmp_path: Path) -> None:
    (out / "report.html").unlink()
    done = benchmark(repo, f"report={out}")
    assert done.returncode == 0, done.stderr
    assert colours_on(screenshot(out / "report.html", tmp_path, height=3000)) >= set(COLOURS[:4])
