"""What the witness does when a run's process ends without a message, as when Ray ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.launch.assembly.witness import KILLED
from tandem.launch.storage.claim import claimed
from tandem.workers.cluster.ray_watch import RAYLET_LOST

DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from tandem.launch.assembly import witness

folder, session, raylet = sys.argv[1:4]
witness.own_raylet = lambda: raylet
one = witness.Witness(Path(folder), time.time() - 60, Path(session))
log = open(os.devnull if "joined" in sys.argv else session + "/log", "w")
ray = subprocess.Popen(["sleep", "60"], stdout=log, stderr=log)
log.close()
one.ray_has_started()
print(ray.pid, flush=True)
sys.stdin.readline()
if "over" in sys.argv:
    one.close()
os._exit(1)
"""


@dataclass
class Left:
    """The state that driver and witness leave behind."""

    summary: dict[str, Any] | None
    said: str
    folder: Path
    session: Path
    ray_lives: bool


def end(place: Path, how: str) -> Left:
    """Ends a run of two steps in the way that `how` names."""
    folder, session = place / "run", place / "session"
    for one in (folder, session):
        one.mkdir()
    (folder / "config.yaml").write_text("run: {name: run}\n")
    steps = [{"step": step, "reward/mean": step / 4, "memory/actor/peak_bytes": 7} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 3, "rew')
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as stack:
        server.bind(str(place / "raylet"))
        server.listen()
        command = [sys.executable, "-c", DRIVER, str(folder), str(session), str(place / "raylet"), how]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        driver = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        assert driver.stdout is not None
        ray = int(driver.stdout.readline())
        connection, _ = server.accept()
        if how == "raylet":
            connection.close()
            time.sleep(1.0)  # the driver outlives the raylet
        if how == "claimed":
            stack.enter_context(claimed(folder))
        if how == "signals":
            os.killpg(driver.pid, signal.SIGHUP)
        _, said = driver.communicate("\n", timeout=30)  # the witness has ended too: it had the same standard error
        connection.close()
    ray_lives = psutil.pid_exists(ray) and psutil.Process(ray).status() != psutil.STATUS_ZOMBIE
    if ray_lives:
        os.kill(ray, signal.SIGKILL)
    path = folder / "summary.json"
    return Left(json.loads(path.read_text()) if path.exists() else None, said, folder, session, ray_lives)


@pytest.mark.parametrize(("how", "why"), [("raylet", RAYLET_LOST), ("killed", KILLED), ("signals", KILLED)])
def test_the_records_are_closed_and_what_is_left_is_cleared_away(tmp_path: Path, how: str, why: str) -> None:
    left = end(tmp_path, how)
    assert left.summary is not None
    assert (left.summary["status"], left.summary["error"], left.summary["steps"]) == ("failed", why, 2)
    assert left.summary["metrics"]["reward/mean"] == 0.5
    assert left.summary["peak_memory_bytes"] == {"actor": 7}
    assert left.summary["time/total_s"] > 60
    assert "failed" in (left.folder / "report.html").read_text()
    assert why in left.said
    assert not left.session.exists()
    assert not left.ray_lives


def test_a_run_that_is_over_needs_no_witness(tmp_path: Path) -> None:
    left = end(tmp_path, "over")
    assert left.summary is None
    assert left.session.exists()
    assert left.ray_lives
    assert left.said == ""


def test_a_cluster_that_was_joined_lives_on(tmp_path: Path) -> None:
    left = end(tmp_path, "joined")
    assert left.summary is not None
    assert left.ray_lives


def test_a_run_that_goes_on_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    assert end(tmp_path, "claimed").summary is None
