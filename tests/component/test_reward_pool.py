"""The processes that run reward functions: hung, crashed, killed, replaced and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from reward_cases import alive, assert_gone, samples

from tandem.platform.rewards import Outcome, RewardError, Sample
from tandem.workers.sandbox import RewardPool


def test_hanging_samples_time_out_and_the_others_are_scored(functions: str) -> None:
    pool = RewardPool([functions, "exact_match"], processes=2, timeout_s=1.0, memory_limit_mb=1024)
    batch = samples("hang", "7", "gil", "7", "hang", "x", "gil", "7")
    start = time.monotonic()
    outcomes = pool.run(batch)
    assert time.monotonic() - start < 1.0 * 2 + 4.0  # 4 hang, 2 at a time
    assert [row[0].problem for row in outcomes] == ["timeout", None] * 4
    assert [row[1].value for row in outcomes] == [0, 1, 0, 1, 0, 0, 0, 1]  # the next function still runs
    assert pool.restarts == 4
    start = time.monotonic()
    assert [row[1].value for row in pool.run(samples(*["7"] * 200))] == [1.0] * 200
    assert time.monotonic() - start < 1.0
    pids = pool.pids()
    pool.close()
    assert_gone(pids)


def test_a_long_chunk_goes_on_after_a_hang(functions: str) -> None:
    pool = RewardPool(["exact_match", functions], processes=1, timeout_s=0.3)
    texts = ["7", "x", "hang", "hang", "7"] + ["7"] * 200
    outcomes = pool.run(samples(*texts))
    assert [row[0].value for row in outcomes] == [float(text == "7") for text in texts]
    assert [row[1].problem for row in outcomes[:5]] == [None, None, "timeout", "timeout", None]
    pool.close()


def test_what_a_crashed_function_started_is_ended(functions: str, tmp_path: Path) -> None:
    pool = RewardPool([functions])
    note = tmp_path / "pid"
    assert pool.run([Sample(str(note), "leak", None, 1, False)])[0][0].problem == "crash"
    assert_gone([int(note.read_text())])
    pool.close()


def test_a_process_killed_between_calls_is_replaced(functions: str) -> None:
    pool = RewardPool([functions])
    os.kill(pool.pids()[0], signal.SIGKILL)
    time.sleep(0.1)
    assert pool.run(samples("a")) == [[Outcome(0.5)]]
    pool.close()


def test_processes_work_at_the_same_time(functions: str) -> None:
    pool = RewardPool([functions], processes=4)
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
            RewardPool([f"{tmp_path}/bad.py:f"], processes=2)
    (tmp_path / "bad.py").write_text("import time; time.sleep(60)\n")
    with pytest.raises(RewardError, match=r"did not start within 0\.5 s"):
        RewardPool([f"{tmp_path}/bad.py:f"], processes=2, startup_s=0.5)
    assert threading.active_count() == before


def test_close_ends_processes_and_calls(functions: str) -> None:
    pool = RewardPool([functions], processes=2)
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
    code = f"""
from tandem.platform.rewards import Sample
from tandem.workers.sandbox import RewardPool
pool = RewardPool([{functions!r}], processes=2, timeout_s=1000)
pool.submit([Sample("q", "gil", None, 1, False)])
print(*pool.pids(), flush=True)
input()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, env=environment, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(0.3)
        assert all(map(alive, pids))
        parent.kill()
    assert len(pids) == 2
    assert_gone(pids)
