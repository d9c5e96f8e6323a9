"""Reward functions in processes of their own: a function that hangs, crashes or eats memory costs one sample.

Each process is owned by one thread of the pool, which starts it, feeds it, times each function from outside, and kills
and replaces it. There are no signals and no alarms, so a pool works in any thread, in an asyncio executor and in a Ray
actor.

This isolates faults; it is no security boundary. Reward functions are code of the user, with the user's rights. Accidents
cost their own sample: endless loops, crashes, memory, forks and processes left behind, floods of output, bytes written to
a wrong descriptor, a kill of the parent. A function that wants to can still read the run's environment and files, send
signals to any process of the user, and change what a later function in the same process sees. Code written by a model must
not be run by a reward function.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.platform.rewards import Outcome, RewardError, Sample
from tandem.platform.search_path import without_sources
from tandem.workers.frames import ProtocolError, new_nonce, receive, send

STARTUP_S = 60.0  # a user's file may import much
END_S = 7.0  # for a process and all that it has started
LARGEST_ANSWER = 2**24  # bytes
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
        if child is None or not child.is_fit():
            self._discard(child)
            child = self._spawn()
        child.send((task.samples, task.first), self._startup_s)
        count = len(self._functions)
        for unit in range(task.first, len(task.samples) * count):
            if unit > task.first and not child.is_fit():  # it broke after the last answer: this unit is not to blame
                self._replace(child, task, unit)
                return None
            task.call.set(task.start + unit // count, unit % count, child.outcome(self._timeout_s))
            if child.lost:
                self._replace(child, task, unit + 1)
                return None
        return child

    def _replace(self, child: _Child, task: _Task, unit: int) -> None:
        """Ends the child and queues its task from `unit` on."""
        self._discard(child)
        done, first = divmod(unit, len(self._functions))
        rest = task.samples[done:]
        self._put(_Task(task.call, task.start + done, rest, first), max(1, len(rest) // len(self._threads)))

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
        self._channel, theirs = socket.socketpair()
        path = os.pathsep.join(without_sources(sys.path, os.environ.get("PYTHONPATH", "")))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tandem.workers.reward_process"],
                stdin=theirs.fileno(),
                stdout=2,  # the log
                env={**os.environ, **ONE_THREAD, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path},
                start_new_session=True,  # no Ctrl-C
            )
        self._start = {"functions": list(functions), "memory_mb": memory_mb, "pool": os.getpid()}

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the functions are loaded; RewardError if they cannot be."""
        try:
            failed = json.loads(self._ask(json.dumps(self._start).encode(), timeout_s))["failed"]
        except TimeoutError:
            raise RewardError(f"a reward process did not start within {timeout_s:g} s") from None
        except EOFError:
            raise RewardError(f"a reward process ended while it started ({self._ending()})") from None
        except ProtocolError as error:
            raise RewardError(
                f"a reward function wrote to the channel of its process while it was loaded: {error}"
            ) from None
        if failed is not None:
            raise RewardError(failed)

    def send(self, message: Any, timeout_s: float) -> None:
        """Hands over a chunk."""
        with contextlib.suppress(ConnectionError, TimeoutError):  # `outcome` says so
            send(self._channel, new_nonce(), pickle.dumps(message), timeout_s)

    def outcome(self, timeout_s: float) -> Outcome:
        """The outcome of the next unit; a process that gives none in time, ends, or breaks the protocol is lost."""
        self.lost = True
        try:
            outcome = _as_outcome(self._ask(b"", timeout_s))
        except TimeoutError:
            return Outcome(None, "timeout", f"took over {timeout_s:g} s")
        except EOFError:
            return Outcome(None, "crash", f"the process ended ({self._ending()})")
        except ProtocolError as error:
            return Outcome(None, "crash", f"wrote to the channel of its process: {error}")
        self.lost = False
        return outcome

    def is_fit(self) -> bool:
        """Whether the process lives, and has said nothing that it was not asked for."""
        self._channel.settimeout(0)
        try:
            self._channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except ConnectionError:
            pass
        return False

    def kill(self) -> None:
        """Ends the process and what it started, and waits for their end."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # a function may have stopped it
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def release(self) -> None:
        """Gives back the socket; only the owning thread may."""
        self._channel.close()

    def _ask(self, body: bytes, timeout_s: float) -> bytes:
        """The answer; TimeoutError, EOFError at the end of the process, or ProtocolError."""
        nonce = new_nonce()
        try:
            send(self._channel, nonce, body, timeout_s)
        except ConnectionError:
            raise EOFError from None
        return receive(self._channel, nonce, limit=LARGEST_ANSWER, timeout_s=timeout_s)[1]

    def _ending(self) -> str:
        """How the process ended, after its socket has closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.kill()
        code = self.process.returncode
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _as_outcome(answer: bytes) -> Outcome:
    """An answer as an outcome; ProtocolError if it is none."""
    try:
        value, problem, detail, pairs = json.loads(answer)
        steps = tuple((int(end), float(reward)) for end, reward in pairs)
        outcome = Outcome(None if value is None else float(value), problem, str(detail), steps)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"an answer that is no outcome ({error})") from None
    if outcome.value is not None and not math.isfinite(outcome.value):
        raise ProtocolError("an answer that is no finite number")
    return outcome
