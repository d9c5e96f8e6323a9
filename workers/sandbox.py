"""Reward functions in processes of their own: a function that hangs, crashes or eats memory costs one sample.

Each process is owned by one thread of the pool, which starts it, feeds it, times each function from outside, and kills
and replaces it. There are no signals and no alarms, so a pool works in any thread, in an asyncio executor and in a Ray
actor.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.platform.rewards import Outcome, RewardError, Sample
from tandem.platform.search_path import without_sources
from tandem.workers.private_cluster import TOKEN

STARTUP_S = 60.0  # a user's file may import much
LARGEST_CHUNK = 32  # samples sent at a time
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


class RewardPool:
    """Runs reward functions on samples in `processes` processes; safe to call from several threads at once."""

    def __init__(
        self,
        functions: Sequence[str],
        *,
        processes: int = 1,
        timeout_s: float = 10.0,
        memory_limit_mb: int = 4096,
        startup_s: float = STARTUP_S,
    ) -> None:
        """Starts the processes; RewardError if a function (a built-in's name, or path.py:name) cannot be loaded.

        `timeout_s` is for one function on one sample, `memory_limit_mb` MiB of address space for each process.
        """
        self._functions = list(functions)
        self._timeout_s, self._memory_mb, self._startup_s = timeout_s, memory_limit_mb, startup_s
        self._tasks: queue.Queue[_Task | None] = queue.Queue()
        self._lock = threading.Lock()  # guards the four below
        self._children: set[_Child] = set()
        self._calls: set[Call] = set()
        self._closed = False
        self._started = 0
        starts = [_Start() for _ in range(processes)]
        self._threads = [
            threading.Thread(target=self._serve, args=(start,), name=f"reward-{i}", daemon=True)
            for i, start in enumerate(starts)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for start in starts:
                start.wait()
        except BaseException:
            self.close()
            raise

    @property
    def restarts(self) -> int:
        """Processes started beyond the first of each thread."""
        return max(0, self._started - len(self._threads))

    def pids(self) -> list[int]:
        """Process ids of the running processes."""
        with self._lock:
            return sorted(child.process.pid for child in self._children)

    def submit(self, samples: Sequence[Sample]) -> Call:
        """Starts scoring; `Call.wait` gives the outcomes."""
        call = Call(len(samples), len(self._functions))
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            if not call.done.is_set():
                self._calls.add(call)
        share = len(samples) // (4 * len(self._threads))  # some slack, so that no process is left with the slow ones
        self._put(_Task(call, 0, samples, 0), min(max(share, 1), LARGEST_CHUNK))
        return call

    def run(self, samples: Sequence[Sample]) -> list[list[Outcome]]:
        """Per sample, in order: the outcome of each function, in order."""
        return self.submit(samples).wait()

    def close(self) -> None:
        """Kills the processes; a call in progress raises RuntimeError. May be called twice."""
        with self._lock:
            first, self._closed = not self._closed, True
            children, calls = list(self._children), list(self._calls)
        for call in calls:
            call.fail(RuntimeError("the reward pool was closed during a call"))
        for child in children:
            child.kill()
        for _ in self._threads if first else ():
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _put(self, task: _Task, size: int) -> None:
        """Queues a task in pieces of `size` samples."""
        for offset in range(0, len(task.samples), size):
            piece = task.samples[offset : offset + size]
            self._tasks.put(_Task(task.call, task.start + offset, piece, 0 if offset else task.first))

    def _serve(self, start: _Start) -> None:
        """The life of one thread. It must outlive its child: the kernel kills the child with it."""
        child = None
        try:
            child = self._spawn()
        except BaseException as error:
            start.error = error
        start.ready.set()
        while (task := self._tasks.get()) is not None:
            if task.call.done.is_set():
                continue
            try:
                child = self._work(child, task)
            except BaseException as error:
                self._discard(child)
                child = None
                task.call.fail(error)
            if task.call.done.is_set():
                with self._lock:
                    self._calls.discard(task.call)
        self._discard(child)

    def _work(self, child: _Child | None, task: _Task) -> _Child | None:
        """Runs one task on the child, or on a new one; returns the child if it is still fit for work."""
        if child is None or child.has_ended():
            self._discard(child)
            child = self._spawn()
        child.send((task.samples, task.first), self._startup_s)
        count = len(self._functions)
        for unit in range(task.first, len(task.samples) * count):
            outcome = child.outcome(self._timeout_s)
            task.call.set(task.start + unit // count, unit % count, outcome)
            if child.lost:
                self._discard(child)
                done, first = divmod(unit + 1, count)
                rest = task.samples[done:]
                self._put(_Task(task.call, task.start + done, rest, first), max(1, len(rest) // len(self._threads)))
                return None
        return child

    def _spawn(self) -> _Child:
        with self._lock:  # no child may appear after close() has looked for them
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            child = _Child(self._functions, self._memory_mb)
            self._children.add(child)
            self._started += 1
        try:
            child.wait_ready(self._startup_s)
        except BaseException:
            self._discard(child)
            raise
        return child

    def _discard(self, child: _Child | None) -> None:
        if child is None:
            return
        child.kill()
        child.release()
        with self._lock:
            self._children.discard(child)


class Call:
    """The outcomes of one batch of samples, as they come in."""

    def __init__(self, samples: int, functions: int) -> None:
        self._outcomes: list[list[Outcome]] = [[Outcome(None, "none")] * functions for _ in range(samples)]
        self._left = samples * functions
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.done = threading.Event()
        if not self._left:
            self.done.set()

    def set(self, sample: int, function: int, outcome: Outcome) -> None:
        """Takes one outcome; each is given once."""
        with self._lock:
            self._outcomes[sample][function] = outcome
            self._left -= 1
            if self._left == 0:
                self.done.set()

    def fail(self, error: BaseException) -> None:
        """Ends the call with an error, unless it has ended."""
        with self._lock:
            if not self.done.is_set():
                self._error = error
                self.done.set()

    def wait(self) -> list[list[Outcome]]:
        """All outcomes, or the error. It ends: every function and every start has a deadline of its own."""
        self.done.wait()
        if self._error is not None:
            raise self._error
        return self._outcomes


@dataclass(frozen=True)
class _Task:
    call: Call
    start: int  # the place of the first sample in its call
    samples: Sequence[Sample]
    first: int  # the first unit to run: function `first % F` on sample `first // F`


class _Start:
    """How the start of a thread's first process went."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.ready.wait()
        if self.error is not None:
            raise self.error


class _Child:
    """A reward process and our end of the socket to it."""

    def __init__(self, functions: Sequence[str], memory_mb: int) -> None:
        self.lost = False  # timed out or dead: of no more use
        self._socket, theirs = socket.socketpair()
        self._buffer = bytearray()
        self._lines: list[bytes] = []
        numbers = [str(number) for number in (theirs.fileno(), os.getpid(), memory_mb)]
        path = os.pathsep.join(without_sources(sys.path, os.environ.get("PYTHONPATH", "")))
        inherited = {name: value for name, value in os.environ.items() if name != TOKEN}  # it may run what a model wrote
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tandem.workers.reward_process", *numbers, *functions],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**inherited, **ONE_THREAD, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path},
                start_new_session=True,  # a group, so that what a function starts can be killed with it; no Ctrl-C
            )

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the functions are loaded; RewardError if they cannot be."""
        try:
            failed = self._next(timeout_s)["failed"]
        except TimeoutError:
            raise RewardError(f"a reward process did not start within {timeout_s:g} s") from None
        except EOFError:
            raise RewardError(f"a reward process ended while it started ({self._ending()})") from None
        if failed is not None:
            raise RewardError(failed)

    def send(self, message: Any, timeout_s: float) -> None:
        """Hands over a chunk."""
        body = pickle.dumps(message)
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(ConnectionError):  # it died just now: `outcome` says so
            self._socket.sendall(len(body).to_bytes(8, "big") + body)

    def outcome(self, timeout_s: float) -> Outcome:
        """The next outcome; a process that gives none in time, or ends, is lost."""
        try:
            value, problem, detail, steps = self._next(timeout_s)
            return Outcome(value, problem, detail, tuple((end, reward) for end, reward in steps))
        except TimeoutError:
            self.lost = True
            return Outcome(None, "timeout", f"took over {timeout_s:g} s")
        except EOFError:
            self.lost = True
            return Outcome(None, "crash", f"the process ended ({self._ending()})")

    def kill(self) -> None:
        """Kills the process and what it started, and waits for its end."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:  # else its number may be another's by now
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def release(self) -> None:
        """Gives back the socket; only the owning thread may."""
        self._socket.close()

    def _next(self, timeout_s: float) -> Any:
        """The next message; TimeoutError, or EOFError at the end of the process."""
        deadline = time.monotonic() + timeout_s
        while not self._lines:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(2**16)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            *lines, self._buffer[:] = (self._buffer + data).split(b"\n")
            self._lines = [bytes(line) for line in reversed(lines)]
        return json.loads(self._lines.pop())

    def has_ended(self) -> bool:
        """Whether the process is dead. It is not reaped yet, so that its group can still be killed safely."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:
            return True

    def _ending(self) -> str:
        """How the process ended, after its socket has closed."""
        deadline = time.monotonic() + 1.0
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.002)
        self.kill()
        code = self.process.returncode
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
