"""The runs of a folder, listed and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.launch.runs import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a finished PPO run, a failed GRPO run, and a run whose process was killed."""
    for name, algo, reward, status in (
        ("a", "ppo", 0.5, "finished"),
        ("b", "grpo", 0.75, "failed"),
        ("c", "grpo", 0.1, None),
    ):
        place = tmp_path / name
        place.mkdir()
        lr = "1.0e-05" if name == "a" else "2.0e-05"
        (place / "config.yaml").write_text(f"adv_estimator: gae\nrun: {{name: {name}, seed: 0}}\nactor: {{lr: {lr}}}\n")
        about = {"algo": algo, "user": "ada", "started_at": f"2026-01-0{len(name)}T00:00:00", "tags": ["x"]}
        (place / "run.json").write_text(json.dumps(about))
        step = {"step": 7, "reward/mean": reward, "memory/actor/peak_bytes": 2**30, "memory/critic/peak_bytes": 2**30}
        evaluated = {"step": 7, "eval/held/greedy": reward / 2, "eval/held/greedy_low": 0.0}
        (place / "metrics.jsonl").write_text(json.dumps(step) + "\n" + json.dumps(evaluated) + '\n{"step": 8, "rew')
        if status:
            (place / "summary.json").write_text(
                json.dumps({"status": status, "error": "why" if status == "failed" else None})
            )
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    assert main([*arguments, f"folder={folder}"]) == 0
    return capsys.readouterr().out


def test_a_table_of_all(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    head, *rows = said(capsys, folder).splitlines()
    assert head.split() == ["name", "algo", "status", "step", "reward", "accuracy", "memory", "who", "when"]
    assert sorted(row.split()[0] for row in rows) == ["a", "b", "c"]
    [a] = [row for row in rows if row.startswith("a")]
    assert a.split() == ["a", "ppo", "finished", "7", "0.5", "0.25", "2.0", "GiB", "ada", "2026-01-01T00:00:00"]
    assert "running or killed" in next(row for row in rows if row.startswith("c"))


def test_a_folder_of_something_else_is_left_out(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "odd").mkdir()
    (folder / "odd" / "config.yaml").write_text("- a list")
    (folder / "b" / "summary.json").write_text("null")
    (folder / "c" / "metrics.jsonl").write_bytes(b"5\n\xff\xfe\n")
    text = said(capsys, folder)
    assert sorted(line.split()[0] for line in text.splitlines()[1:4]) == ["a", "b", "c"]
    assert "odd is left out" in text


def test_filters(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    rows = said(capsys, folder, "list", "algo=grpo", "status=failed").splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["b"]
    assert "no runs in" in said(capsys, folder, "who=nobody")


def test_one(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    text = said(capsys, folder, "show", "b")
    assert "why" in text
    assert "actor.lr" in text
    assert "eval/held/greedy_low" not in text
    assert "1.0 GiB" in text
    assert "run.seed" not in text  # the default value
    assert "run.seed" in said(capsys, folder, "show", "b", "--all")


def test_two_side_by_side(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    text = said(capsys, folder, "compare", "a", "b")
    settings, numbers = text.split("\n\n")
    assert [line.split()[0] for line in settings.splitlines()[1:]] == ["actor.lr"]
    [reward] = [line.split() for line in numbers.splitlines() if line.startswith("reward/mean")]
    assert reward == ["reward/mean", "0.5", "0.75", "+0.25"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["shwo", "a"], "expected list, show NAME"), (["show", "z"], "no run there"), (["statsu=x"], "statsu: no such field")],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], why: str) -> None:
    assert main([*arguments, f"folder={folder}"]) == 2
    assert why in capsys.readouterr().err
