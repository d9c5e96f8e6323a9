"""The page of a run, in a real browser."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from in_browser import colours_on, look_at, screenshot

from tandem.launch.assembly.run import run
from tandem.launch.compose.compose import compose
from tandem.launch.report import main
from tandem.launch.views.page import render
from tandem.launch.views.palette import COLOURS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of PPO with a KL term and held-out samples."""
    place = tmp_path_factory.mktemp("runs")
    small = ["model.warmstart.steps=0", "data.prompts_per_step=4", "rollout.samples_per_prompt=2", "task.eval_size=4"]
    more = ["algo.kl_loss_coef=0.1", "eval.every=2", "eval.samples_per_prompt=2", "tracking.samples_every=2"]
    own = [
        "cluster=inline",
        "run.steps=6",
        "run.name=r",
        f"run.dir={place}",
        "tracking.console=none",
        "reward.functions.boxed=0",
    ]
    config, _ = compose(["algo=ppo", *small, *more, *own, "reward.functions.exact_match=1"])
    assert run(config, time.time()) == 0
    return place / "r"


def test_a_run_leaves_its_page(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    for title in (
        "Reward",
        "Held-out accuracy",
        "KL to the reference",
        "Entropy",
        "Explained variance",
        "Time per phase",
        "Memory per role",
    ):
        assert f">{title}" in text
    assert "log-prob gap" in text
    assert len(re.findall("<tr>", text)) > 8
    # The page loads nothing from other addresses.
    assert not re.findall(r"""(?:src|href)="(?!#)|@import|url\((?!#)""", text)


@pytest.mark.parametrize("width", [1440, 700, 400])
def test_it_looks_right_in_a_browser(folder: Path, tmp_path: Path, width: int) -> None:
    found = look_at(folder / "report.html", tmp_path, width)
    assert found.faults == {"bad": [], "wide": False}
    assert found.text.count("<svg") >= 11


def test_a_screenshot_shows_the_curves(folder: Path, tmp_path: Path) -> None:
    assert colours_on(screenshot(folder / "report.html", tmp_path, height=2600)) >= set(COLOURS[:3])


def test_its_samples_are_of_many_prompts(folder: Path) -> None:
    """All eight samples of four prompts are kept, the worst first."""
    rows = [json.loads(line) for line in (folder / "samples" / "step-000006.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert len({row["group_id"] for row in rows}) == 4
    rewards = [row["reward"] for row in rows]
    assert rewards == sorted(rewards)


def test_samples_cannot_break_the_page(folder: Path) -> None:
    """Markup in a response is shown as text."""
    path = max((folder / "samples").iterdir())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["response"] = "<script>alert(1)</script>&"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in render(folder)
    assert "<script>alert" not in render(folder)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "report.html").unlink()
    assert main([str(folder)]) == 0
    assert (folder / "report.html").exists()
    assert main([str(folder / "nothing")]) == 2
    assert "no run there" in capsys.readouterr().err
