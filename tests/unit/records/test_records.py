"""metrics.jsonl, summary.json and samples/ are written so that no finished step is lost."""

from __future__ import annotations

import json
import math
import time
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from unit_batches import make_rollout

from tandem.platform.experience.batch import Score, StopReason
from tandem.platform.records.recorder import (
    Recorder,
    SampleRow,
    plain,
    read_metrics,
    read_samples,
    read_summary,
    sample_rows,
)
from tandem.platform.system.files import write_json, write_text


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_plain_is_json() -> None:
    found = plain({"step": 3.0, "loss": 0.25, "nan": math.nan, "inf": -math.inf})
    assert found == {"step": 3, "loss": 0.25, "nan": None, "inf": None}
    assert isinstance(found["step"], int)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_write_json_is_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with pytest.raises(RuntimeError):
        write_json(path, {"a": Unprintable()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = {"step": 1.0, "a": 1e30, "b": -1e308, "c": 5e-324, "d": 2.0**62, "e": math.nan, "f": 0.1}
    recorder = Recorder(tmp_path, time.time())
    recorder.step(1, written, time.time())
    recorder.samples(1, [{"prompt": "p", "reward": math.inf}])
    recorder.close("failed", "why\ud800")
    assert read_metrics(tmp_path) == [{**written, "e": None}]
    assert read_samples(tmp_path) == [(1, SampleRow("p"))]
    summary = read_summary(tmp_path)
    assert (summary.status, summary.error, summary.steps) == ("failed", "why\ud800", 1)
    assert summary.total_s is not None


def test_a_step_is_on_disk_at_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, time.time())
    recorder.step(1, {"step": 1.0, "policy/loss": 0.5}, time.time())
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "policy/loss": 0.5}]
    recorder.close("finished")


def test_summary_of_a_run(tmp_path: Path) -> None:
    started = time.time() - 100
    recorder = Recorder(tmp_path, started)
    recorder.first_evaluation({"step": 0.0, "eval/addition/greedy": 0.25})
    recorder.step(1, {"step": 1.0, "memory/actor/peak_bytes": 900.0, "memory/actor/weights_bytes": 9999.0}, started + 20)
    measured = {"step": 2.0, "memory/actor/peak_bytes": 400.0, "memory/critic/peak_bytes": 7.0, "eval/addition/greedy": 0.5}
    recorder.step(2, measured, started + 30)
    recorder.close("finished")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["error"] is None
    assert summary["steps"] == 2
    assert summary["time/startup_s"] == pytest.approx(20)
    assert 100 <= summary["time/total_s"] < 110
    assert summary["eval_first"] == {"step": 0, "eval/addition/greedy": 0.25}
    assert summary["eval_last"] == {"step": 2, "eval/addition/greedy": 0.5}
    assert summary["peak_memory_bytes"] == {"actor": 900, "critic": 7}
    assert summary["metrics"]["step"] == 2
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_summary_of_a_run_that_failed_before_its_first_step(tmp_path: Path) -> None:
    Recorder(tmp_path, time.time()).close("failed", "ConfigError: no")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"], summary["steps"]) == ("failed", "ConfigError: no", 0)
    assert summary["eval_first"] is None
    assert summary["eval_last"] is None
    assert summary["time/startup_s"] is None
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_run_that_goes_on_has_every_step_once(tmp_path: Path) -> None:
    """Resuming drops the steps after the checkpoint and a last line that was cut off when the process ended."""
    first = Recorder(tmp_path, time.time())
    first.first_evaluation({"step": 0.0, "eval/held/greedy": 0.25})
    for step in (1, 2, 3):
        first.step(step, {"step": float(step), "loss": math.nan, "memory/actor/peak_bytes": 10.0 * step}, time.time())
    first.close("interrupted")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    given: list[dict[str, float | int | None]] = []
    again = Recorder(tmp_path, time.time(), resumed_after=2, on_record=given.append)
    again.step(3, {"step": 3.0}, time.time())
    again.close("finished")
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert lines(tmp_path / "metrics.jsonl")[1]["loss"] is None
    assert given == [{"step": 3}]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["resumed_after"]) == (3, 2)
    assert summary["eval_first"] == {"step": 0, "eval/held/greedy": 0.25}
    assert summary["peak_memory_bytes"] == {"actor": 20}


def test_no_evaluation_leaves_no_step_zero(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, time.time())
    recorder.first_evaluation({"step": 0.0})
    recorder.close("finished")
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_samples_as_a_person_reads_them(tmp_path: Path) -> None:
    rollout = make_rollout(text="7é", answer="7", group=4, stop=StopReason.LENGTH, version=3)
    scored = [Score(1.0, {"exact_match": 1.0}), Score(None, {"exact_match": None}, "timeout")]
    recorder = Recorder(tmp_path, time.time())
    recorder.samples(20, sample_rows([rollout, rollout], scored, [0.5, 0.0], [0.0, 0.25]))
    recorder.close("finished")
    first, second = lines(tmp_path / "samples" / "step-000020.jsonl")
    assert first == {
        "group_id": 4,
        "prompt": "prompt",
        "response": "7é",
        "answer": "7",
        "reward": 1.0,
        "parts": {"exact_match": 1.0},
        "problem": None,
        "advantage": 0.5,
        "logprob_gap": 0.0,
        "stop": "length",
        "response_tokens": 2,
        "policy_version": 3,
    }
    assert (second["reward"], second["problem"]) == (None, "timeout")
    assert "7é" in (tmp_path / "samples" / "step-000020.jsonl").read_text()


def test_samples_must_pair() -> None:
    with pytest.raises(ValueError, match="zip"):
        sample_rows([make_rollout()], [], [], [])


def test_samples_that_json_has_nothing_for_are_written_as_text(tmp_path: Path) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    around: dict[str, Any] = {"a": 1}
    around |= {"x": around, "y": [around]}
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    row = {
        "prompt": "half \ud800 a pair\u2028",
        "response": "7é\0",
        "answer": {b"k\xff": Decimal("1.5"), (1, 2): {3}, None: date(2024, 2, 3), 1: Unprintable()},
        "reward": math.nan,
        "advantage": math.inf,
        "parts": around,
        "long": 10**5000,
        "deep": deep,
    }
    noted: list[str] = []
    recorder = Recorder(tmp_path, time.time(), note=noted.append)
    recorder.samples(1, [row, {"prompt": "next"}])
    recorder.close("finished")
    [found, after] = [
        json.loads(line) for line in (tmp_path / "samples" / "step-000001.jsonl").read_text("utf-8").split("\n")[:-1]
    ]
    assert noted == []
    assert after == {"prompt": "next"}
    assert (found["prompt"], found["response"]) == (row["prompt"], row["response"])
    assert found["answer"] == {"k\\xff": "1.5", "(1, 2)": [3], "None": "2024-02-03", "1": "<Unprintable>"}
    assert (found["reward"], found["advantage"], found["long"]) == (None, None, "<int>")
    assert found["parts"] == {"a": 1, "x": "<dict>", "y": ["<dict>"]}


def test_samples_that_cannot_be_written_cost_one_warning(tmp_path: Path) -> None:
    noted: list[str] = []
    (tmp_path / "samples").write_text("in the way")
    recorder = Recorder(tmp_path, time.time(), note=noted.append)
    for step in (1, 20):
        recorder.samples(step, [{"prompt": "a"}])
    recorder.step(21, {"step": 21.0}, time.time())
    recorder.close("finished")
    [warning] = noted
    assert f"cannot write the samples of step 1 (FileError: {tmp_path}/samples is not a folder" in warning


def test_an_error_with_half_a_pair_is_in_the_summary(tmp_path: Path) -> None:
    Recorder(tmp_path, time.time()).close("failed", "RewardError: \ud800")
    assert json.loads((tmp_path / "summary.json").read_text())["error"] == "RewardError: \ud800"
    write_text(tmp_path / "a.txt", "é\ud800")
    assert (tmp_path / "a.txt").read_bytes() == b"\xc3\xa9\\ud800"
