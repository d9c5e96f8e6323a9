"""Trackers in separate processes: the data they receive, and that no tracker can disturb the run."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.launch.assembly.identity import for_trackers
from tandem.launch.trackers import sinks as module
from tandem.launch.trackers.sink_process import TRACKERS
from tandem.launch.trackers.sinks import Sink, Sinks
from tandem.platform.config.schema import Config
from tandem.platform.planning.validate import SINKS

KEEP = """
import sys
with open(sys.argv[1], "w") as file:
    for line in sys.stdin:
        file.write(line)
        file.flush()
        if "status" in line:
            break
"""


def start(tmp_path: Path, code: str, notes: list[str], *arguments: str) -> Sink:
    return Sink("own", [sys.executable, "-c", code, *arguments], {"run": "r"}, tmp_path / "own.log", notes.append)


def close(sink: Sink, seconds: float = 10.0) -> float:
    """Closes the tracker and asserts that its process has ended; returns the seconds that closing took."""
    began = time.monotonic()
    sink.close(began + seconds)
    assert not psutil.pid_exists(sink._process.pid)
    return time.monotonic() - began


def test_the_names_are_those_that_settings_know() -> None:
    assert set(TRACKERS) == set(SINKS)


def test_everything_arrives_in_order(tmp_path: Path) -> None:
    notes: list[str] = []
    sink = start(tmp_path, KEEP, notes, str(tmp_path / "seen"))
    for step in range(50):
        sink.send({"step": step})
    sink.send({"status": "finished"})
    close(sink)
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert seen == [{"run": "r"}, *({"step": step} for step in range(50)), {"status": "finished"}]
    assert notes == []


def test_one_that_fails_warns_once_with_its_last_words(tmp_path: Path) -> None:
    notes: list[str] = []
    sink = start(tmp_path, "import sys; sys.exit('no network')", notes)
    sink._process.wait()
    for step in range(5):
        sink.send({"step": step})
    close(sink)
    assert len(notes) == 1
    assert "own has ended with code 1: no network; the run goes on without it" in notes[0]


def test_one_that_hangs_neither_blocks_nor_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker reads nothing, so the pipe fills up, and then the queue."""
    monkeypatch.setattr(module, "QUEUE", 20)
    notes: list[str] = []
    sink = start(tmp_path, "import time; time.sleep(600)", notes)
    began = time.monotonic()
    for step in range(2000):
        sink.send({"step": step, "filler": "x" * 1000})
    assert time.monotonic() - began < 2
    assert close(sink, 1.0) < 3
    assert len(notes) == 1
    assert "is 20 records behind" in notes[0]


def test_one_that_asks_gets_no_answer(tmp_path: Path) -> None:
    """A tracker that prompts for input has no terminal to read from."""
    notes: list[str] = []
    sink = start(tmp_path, "import getpass; getpass.getpass('API key: ')", notes)
    assert close(sink, 5.0) < 8


def test_a_run_that_is_killed_leaves_no_tracker(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tandem.launch.trackers.sinks import Sink\n"
        "reader = [sys.executable, '-c', 'import sys; [None for _ in sys.stdin]']\n"
        "sink = Sink('own', reader, {}, Path(sys.argv[1]), print)\n"
        "print(sink._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], capture_output=True, text=True)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(int(done.stdout))


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "hunter2hunter2")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing answers there
    config = Config()
    config.run.name, config.run.dir = "r", str(tmp_path)
    config.tracking.tags = ["first", "hunter2hunter2"]
    config.checkpoint.dir = "s3://hunter2hunter2@bucket"
    (tmp_path / "r").mkdir()
    return for_trackers(config, tmp_path / "r", time.time())


@pytest.mark.slow
@pytest.mark.parametrize("name", SINKS)
def test_a_real_tracker(tmp_path: Path, facts: dict[str, Any], name: str) -> None:
    """Runs offline and without an API key; a planted secret appears in none of the tracker's files."""
    notes: list[str] = []
    sinks = Sinks([name], facts, tmp_path / "r", notes.append)
    for step in (1, 2, 3):
        sinks.record({"step": step, "reward/mean": 0.25 * step, "eval/held/pass@4": 0.5, "policy/loss": None})
    sinks.close("finished")
    assert notes == []
    check(name, tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def check(name: str, folder: Path) -> None:
    """Asserts that the rewards 0.25, 0.5, 0.75 are in the tracker's files."""
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "r" / "tracking" / "tensorboard"))
        events.Reload()
        assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    elif name == "mlflow":
        [values] = (folder / "mlruns").glob("*/*/metrics/reward/mean")
        assert [line.split()[1:] for line in values.read_text().splitlines()] == [
            ["0.25", "1"],
            ["0.5", "2"],
            ["0.75", "3"],
        ]
        [status] = [path for path in (folder / "mlruns").glob("*/*/meta.yaml") if "status: 3" in path.read_text()]
        assert (status.parent / "params" / "adv_estimator").read_text() == "gae"
    else:
        [history] = (folder / "r" / "tracking" / "wandb").glob("offline-run-*/run-*.wandb")
        assert b"reward/mean" in history.read_bytes()
        assert os.path.getsize(history) > 500


@pytest.mark.parametrize("planted", ["tracking", "tracking/wandb", "tracking/wandb.log"])
def test_nothing_is_written_through_a_link(tmp_path: Path, planted: str) -> None:
    """The run goes on without the tracker, after one warning."""
    (tmp_path / "run" / "tracking").mkdir(parents=True)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").write_text("kept")
    if planted == "tracking":
        (tmp_path / "run" / "tracking").rmdir()
    (tmp_path / "run" / planted).symlink_to(tmp_path / "target" / ("file" if planted.endswith(".log") else ""))
    notes: list[str] = []
    sinks = Sinks(["wandb"], {}, tmp_path / "run", notes.append)
    sinks.close("finished")
    assert [path.read_text() for path in (tmp_path / "target").iterdir()] == ["kept"]
    [note] = notes
    assert f"{planted} is a link, which is not followed; the run goes on without it" in note
