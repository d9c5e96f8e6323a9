"""Shared by the tests of the reward role: rollouts, samples, and functions that misbehave."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.platform.experience.batch import Prompt, Rollout, StopReason
from tandem.platform.rewards.functions import Outcome, Sample
from tandem.workers.isolation.reward_pool import RewardPool

FUNCTIONS = """
import ctypes, math, os, sys, time
import resource

def act(sample):
    what = sample.response
    if what == "hang":
        while True:
            pass
    if what == "gil":
        nine = 9
        return float(nine**nine**nine > 0)
    if what == "greedy":
        return float(len(bytearray(2**34)))
    if what == "exit":
        os._exit(7)
    if what == "segv":
        ctypes.string_at(0)
    if what == "sleep":
        time.sleep(0.3)
    if what == "leak":
        os.system("sleep 1000 & echo $! > " + sample.prompt)
        os._exit(1)
    if what == "raise":
        raise KeyError("no such key")
    if what == "print":
        print("[1.0, null, null]", flush=True)
        os.write(1, b"to file descriptor 1\\n")
    values = {"none": None, "nan": math.nan, "inf": math.inf, "list": [1.0], "text": "1"}
    return values.get(what, 0.5)

def environment(sample):
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    assert address_space == 512 * 2**20, address_space
    assert os.environ["OMP_NUM_THREADS"] == "1"
    return sample.response_tokens + 10 * sample.truncated + len(sample.metadata["source"])
"""


def rollout(text: str, answer: Any = "7", prompt: str = "3+4=", group: int = 5) -> Rollout:
    return Rollout(
        prompt=Prompt(ids=(3, 4), group_id=group, text=prompt, answer=answer, metadata={"source": "abc"}),
        response_ids=(9, 1),
        response_mask=(True, True),
        logprobs=(-0.5, -0.5),
        stop=StopReason.LENGTH,
        policy_version=0,
        response_text=text,
    )


def samples(*responses: str) -> list[Sample]:
    return [Sample("q", response, "7", 1, False) for response in responses]


class WatchedPool(RewardPool):
    """A pool with additional methods for tests."""

    def run(self, samples: Sequence[Sample]) -> list[list[Outcome]]:
        """Per sample, in order: the outcome of each function, in order."""
        return self.submit(samples).wait()

    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        with self._lock:
            return sorted(child.process.pid for child in self._children)

    @property
    def restarts(self) -> int:
        """Processes started beyond the first of each thread."""
        return max(0, self._spawned - len(self._threads))

    _spawned = 0

    def _spawn(self, lane: Any) -> Any:
        with self._lock:
            self._spawned += 1
        return super()._spawn(lane)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def killed_parent(pool: str, sample: str, note: Path | None = None) -> list[int]:
    """The process ids of a reward pool whose parent was killed during a call or between calls.

    Args:
        pool: code that makes the pool. sample: code that uses the pool. note: a file with the id of one more process.
    """
    code = (
        "from tandem.platform.rewards.functions import Sample\nfrom reward_cases import WatchedPool\n"
        f"pool = {pool}\n{sample}\nprint(*pool.pids(), flush=True)\ninput()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, env=environment, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(0.3)
        pids += [int(note.read_text())] if note else []
        assert all(map(alive, pids))
        parent.kill()
    return pids


def assert_gone(pids: list[int], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]
