"""The processes that run reward functions: hung, crashed, killed, replaced and ended."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from reward_cases import WatchedPool, assert_gone, killed_parent, samples

from tandem.launch.compose.command import SCRIPTS
from tandem.platform.rewards.functions import Outcome, RewardError, Sample
from tandem.platform.system.search_path import without_sources

ROOT = Path(__file__).resolve().parents[3]


def test_hanging_samples_time_out_and_the_others_are_scored(functions: str) -> None:
    pool = WatchedPool([functions, "exact_match"], processes=2, timeout_s=1.0, memory_limit_mb=1024)
    batch = samples("hang", "7", "gil", "7", "hang", "x", "gil", "7")
    start = time.monotonic()
    outcomes = pool.run(batch)
    assert time.monotonic() - start < 1.0 * 2 + 4.0  # 4 hang, 2 at a time
    assert [row[0].problem for row in outcomes] == ["timeout", None] * 4
    assert [row[1].value for row in outcomes] == [0, 1, 0, 1, 0, 0, 0, 1]  # the next function still runs
    assert 2 <= pool.restarts <= 4  # each thread replaces its last process when it has work again
    start = time.monotonic()
    assert [row[1].value for row in pool.run(samples(*["7"] * 200))] == [1.0] * 200
    assert time.monotonic() - start < 1.0
    pids = pool.pids()
    pool.close()
    assert_gone(pids)


def test_a_long_chunk_goes_on_after_a_hang(functions: str) -> None:
    pool = WatchedPool(["exact_match", functions], processes=1, timeout_s=0.3)
    texts = ["7", "x", "hang", "hang", "7"] + ["7"] * 200
    outcomes = pool.run(samples(*texts))
    assert [row[0].value for row in outcomes] == [float(text == "7") for text in texts]
    assert [row[1].problem for row in outcomes[:5]] == [None, None, "timeout", "timeout", None]
    pool.close()


def test_reward_functions_cannot_join_the_runs_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "planted")
    (tmp_path / "own.py").write_text(
        "import os\ndef mine(sample):\n"
        "    return float('planted' in str(dict(os.environ)) + open('/proc/self/environ').read())\n"
    )
    pool = WatchedPool([f"{tmp_path / 'own.py'}:mine"])
    assert pool.run(samples("7"))[0][0].value == 0.0
    pool.close()


def test_what_a_crashed_function_started_is_ended(functions: str, tmp_path: Path) -> None:
    pool = WatchedPool([functions])
    note = tmp_path / "pid"
    assert pool.run([Sample(str(note), "leak", None, 1, False)])[0][0].problem == "crash"
    assert_gone([int(note.read_text())])
    pool.close()


def test_a_process_killed_between_calls_is_replaced(functions: str) -> None:
    pool = WatchedPool([functions])
    os.kill(pool.pids()[0], signal.SIGKILL)
    time.sleep(0.1)
    assert pool.run(samples("a")) == [[Outcome(0.5)]]
    pool.close()


def test_processes_work_at_the_same_time(functions: str) -> None:
    pool = WatchedPool([functions], processes=4)
    start = time.monotonic()
    pool.run(samples(*["sleep"] * 8))
    assert time.monotonic() - start < 8 * 0.3 * 0.75
    pool.close()


def test_failed_starts_leave_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    bad = {
        "syntax": ("def f(:", "bad.py:1: SyntaxError"),
        "dead": ("import os; os._exit(3)", r"ended while it started \(exit code 3\)"),
        "big": ("x = bytearray(2**34)", "MemoryError.*memory_limit_mb"),
    }
    for code, message in bad.values():
        (tmp_path / "bad.py").write_text(code + "\n")
        with pytest.raises(RewardError, match=message):
            WatchedPool([f"{tmp_path}/bad.py:f"], processes=2)
    (tmp_path / "bad.py").write_text("import time; time.sleep(60)\n")
    with pytest.raises(RewardError, match=r"did not start within 0\.5 s"):
        WatchedPool([f"{tmp_path}/bad.py:f"], processes=2, startup_s=0.5)
    assert threading.active_count() == before


def test_close_ends_processes_and_calls(functions: str) -> None:
    pool = WatchedPool([functions], processes=2)
    pids = pool.pids()
    assert len(pids) == 2
    call = pool.submit(samples("gil", "hang", "a"))
    time.sleep(0.2)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 2.0
    with pytest.raises(RuntimeError, match="closed"):
        call.wait()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(samples("a"))
    pool.close()
    assert_gone(pids)


def test_processes_die_with_a_killed_parent(functions: str) -> None:
    pool = f"WatchedPool([{functions!r}], processes=2, timeout_s=1000)"
    pids = killed_parent(pool, 'pool.submit([Sample("q", "gil", None, 1, False)])')
    assert len(pids) == 2
    assert_gone(pids)


NAMES = [
    *(
        "settings",
        "report",
        "evaluate",
        "run",
        "main",
        "resume",
        "roles",
        "export",
        "prepare",
        "doctor",
        "runs",
        "algorithms",
    ),
    *(
        "batch",
        "data",
        "config",
        "losses",
        "units",
        "grading",
        "rewards",
        "reward_pool",
        "sync",
        "cluster",
        "learning",
        "random",
    ),
]
USER = """
import {first}
def score(sample):
    import {second}
    modules = [{names}]
    return float(all(module.MINE == sample.metadata["of"] for module in modules))
"""


@pytest.fixture
def neighbours(tmp_path: Path) -> str:
    """A reward function in a folder of files that are named like tandem's modules; its own file is, too."""
    half = len(NAMES) // 2
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("MINE = 'the user'\n")
    code = USER.format(first=", ".join(NAMES[:half]), second=", ".join(NAMES[half:]), names=", ".join(NAMES))
    (tmp_path / "plan.py").write_text(code)
    return f"{tmp_path}/plan.py:score"


@pytest.mark.parametrize("first", [True, False])
def test_neighbours_of_a_function_are_its_own(neighbours: str, monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """Holds with tandem's folders on the path, and in the same process as `boxed`, which loads sympy."""
    for folder in ("", "platform", "workers", "conf", "launch", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    pool = WatchedPool([neighbours, "boxed"] if first else ["boxed", neighbours])
    metadata = {"of": "the user", "day": datetime.date(2024, 1, 5)}
    outcomes = pool.run([Sample("q", "\\boxed{1+x}", "x+1", 1, False, metadata)] * 2)
    pool.close()
    assert [[outcome.detail or outcome.value for outcome in row] for row in outcomes] == [[1.0, 1.0]] * 2


def test_sources_of_tandem_are_not_looked_into() -> None:
    launch = str(ROOT / "launch")
    assert without_sources([launch, "/other", str(ROOT), f"{launch}/../workers"]) == ["/other"]
    assert without_sources([str(ROOT), launch], f"/x:{ROOT}") == [str(ROOT)]
    assert without_sources(["", "/other"]) == [entry for entry in (os.getcwd(), "/other") if entry != str(ROOT)]


EACH_SCRIPT = """
import os, runpy, sys
import omegaconf, psutil, torch, transformers  # once for all; nothing of tandem
folder, *names = sys.argv[1:]
sys.argv[1:] = ["--help"]
for name in names:
    if os.fork() == 0:
        sys.path.insert(0, folder)
        runpy.run_path(f"{folder}/{name}", run_name="not main")
        import tandem.launch
        offered = [entry for entry in sys.path if entry.endswith("/launch")]
        sys.stdout.flush()
        os._exit(len(offered))
    if os.wait()[1]:
        sys.exit(f"{name} offers its folder, or cannot be run")
"""


def test_a_script_does_not_offer_its_folder() -> None:
    """Runs each script as a file, as in `python launch/main.py`, in its own process and without starting its work."""
    names = [f"{name}.py" for name in SCRIPTS if (ROOT / "launch" / f"{name}.py").exists()]
    assert len(names) >= 8
    subprocess.run([sys.executable, "-c", EACH_SCRIPT, str(ROOT / "launch"), *names], check=True)
