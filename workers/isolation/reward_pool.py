"""Runs reward functions in separate processes: a function that hangs, crashes or exhausts memory costs only one sample.

Each process is owned by one thread of the pool, which starts it, feeds it, times each function from outside, and kills
and replaces it. The pool uses no signals or alarms, so it works in any thread, in an asyncio executor and in a Ray actor.

This isolates faults; it is not a security boundary. Reward functions are the user's code and run with the user's rights.
These accidents cost only their own sample: endless loops, crashes, memory use, forks and orphaned processes, floods of
output, bytes written to a wrong descriptor, a kill of the parent. A malicious function can still read the run's environment
and files, send signals to any process of the user, and change the state that a later function in the same process sees.
Reward functions must not run code written by a model.
"""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.platform.rewards.functions import TRANSIENT, Outcome, Sample
from tandem.workers.isolation.frames import ProtocolError
from tandem.workers.isolation.reward_child import RewardChild

STARTUP_S = 60.0  # a user's file may have slow imports
FIRST_PAUSE_S = 1.0  # before the first retry after a transient error; doubles with each retry
ASYNC_GRACE_S = 2.0  # extra time for an async function that resists cancellation
POLL_S = 0.05  # between checks for more units, while the process works on others


class RewardPool:
    """Runs reward functions on samples in separate processes. Thread-safe.

    Each of `processes` processes runs plain functions on one sample at a time. One additional process runs async functions
    on up to `concurrency` samples at a time.
    """

    def __init__(
        self,
        functions: Sequence[str],
        *,
        processes: int = 1,
        timeout_s: float = 10.0,
        memory_limit_mb: int = 4096,
        retries: int = 3,
        concurrency: int = 16,
        startup_s: float = STARTUP_S,
    ) -> None:
        """Starts the processes; RewardError if a function (a built-in's name, or path.py:name) cannot be loaded.

        `timeout_s` limits one function on one sample; `memory_limit_mb` limits the address space of each process, in MiB.
        After a transient error a function is retried up to `retries` times, with pauses that double.
        """
        self._functions = list(functions)
        self._timeout_s, self._memory_mb, self._startup_s = timeout_s, memory_limit_mb, startup_s
        self._retries = retries
        self._lock = threading.Lock()  # guards the next four attributes
        self._children: set[RewardChild] = set()
        self._calls: set[Call] = set()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._lanes = {False: _Lane(window=1), True: _Lane(window=concurrency, polls=True)}
        try:
            self._is_async = self._start(self._lanes[False], processes)
            if any(self._is_async):
                self._start(self._lanes[True], 1)
        except BaseException:
            self.close()
            raise

    def _start(self, lane: _Lane, count: int) -> list[bool]:
        """Starts `count` threads with a process each and waits until all are ready; returns which functions are async."""
        starts = [_Start() for _ in range(count)]
        for number, start in enumerate(starts):
            thread = threading.Thread(target=self._serve, args=(lane, start), name=f"reward-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        kinds = [start.wait() for start in starts]
        return kinds[0]

    def submit(self, samples: Sequence[Sample]) -> Call:
        """Starts scoring; `Call.wait` gives the outcomes."""
        call = Call(len(samples), len(self._functions))
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            if not call.done.is_set():
                self._calls.add(call)
        for place, sample in enumerate(samples):
            for number in range(len(self._functions)):
                self._put(_Unit(call, place, number, sample))
        return call

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
            for lane in self._lanes.values():
                lane.queue.put(None)
        for thread in self._threads:
            thread.join()

    def _put(self, unit: _Unit) -> None:
        self._lanes[self._is_async[unit.function]].queue.put(unit)

    def _serve(self, lane: _Lane, start: _Start) -> None:
        """The main loop of one thread. The thread must outlive its child: the kernel kills the child when it ends."""
        child: RewardChild | None = None
        asked: dict[bytes, _Asked] = {}
        try:
            child = self._spawn(lane)
            start.is_async = child.is_async
        except BaseException as error:
            start.error = error
        start.ready.set()
        while True:
            try:
                child = self._ask(child, lane, asked)
                child = self._take(child, lane, asked)
            except _Closed:
                break
            except BaseException as error:
                for unit in [pending.unit for pending in asked.values()]:
                    unit.call.fail(error)
                asked.clear()
                self._discard(child)
                child = None
        self._discard(child)

    def _ask(self, child: RewardChild | None, lane: _Lane, asked: dict[bytes, _Asked]) -> RewardChild | None:
        """Sends units to the child, or to a new child, until the window is full."""
        while len(asked) < lane.window and not any(pending.unit.alone for pending in asked.values()):
            unit = lane.next(waits=not asked)
            if unit is None:
                break
            if unit.call.done.is_set():
                continue
            if unit.alone and asked:
                lane.queue.put(unit)
                break
            if not asked and (child is None or not child.is_fit()):  # no unit is to blame for a child that broke while idle
                self._discard(child)
                child = None
                try:
                    child = self._spawn(lane)
                except BaseException as error:
                    unit.call.fail(error)
                    continue
            assert child is not None
            grace = ASYNC_GRACE_S if lane.polls else 0.0  # the process itself times async functions too
            nonce = child.ask((unit.function, unit.sample), self._timeout_s)
            asked[nonce] = _Asked(unit, time.monotonic() + self._timeout_s + grace)
        return child

    def _take(self, child: RewardChild | None, lane: _Lane, asked: dict[bytes, _Asked]) -> RewardChild | None:
        """Takes one answer if it arrives in time; returns the child if it can still be used."""
        if child is None or not asked:
            return child
        deadline = min(pending.deadline for pending in asked.values())
        if not child.has_said_something(min(deadline - time.monotonic(), POLL_S if lane.polls else math.inf)):
            if time.monotonic() < deadline:
                return child
            self._settle_overdue(asked)
        else:
            try:
                nonce, outcome = child.answer(asked, max(deadline - time.monotonic(), 0.001))
                self._settle(asked.pop(nonce).unit, outcome)
                return child
            except TimeoutError:
                self._settle_overdue(asked)
            except EOFError:
                self._settle_crash(asked, f"the process ended ({child.ending()})")
            except ProtocolError as error:
                self._settle_crash(asked, f"wrote to the channel of its process: {error}")
        self._discard(child)
        return None

    def _settle_overdue(self, asked: dict[bytes, _Asked]) -> None:
        """Settles overdue units as timeouts and requeues the others."""
        now = time.monotonic()
        for pending in asked.values():
            if pending.deadline <= now:
                self._settle(pending.unit, Outcome(None, "timeout", f"took over {self._timeout_s:g} s"))
            else:
                self._put(pending.unit)
        asked.clear()

    def _settle_crash(self, asked: dict[bytes, _Asked], detail: str) -> None:
        """Settles a single unit as a crash. If several units were running, retries each alone to find the cause."""
        for pending in asked.values():
            if len(asked) == 1:
                self._settle(pending.unit, Outcome(None, "crash", detail))
            else:
                self._put(replace(pending.unit, alone=True))
        asked.clear()

    def _settle(self, unit: _Unit, outcome: Outcome) -> None:
        """Records the outcome of a unit, or schedules another attempt after a transient error."""
        if outcome.problem == TRANSIENT:
            if unit.attempt < self._retries and not unit.call.done.is_set():
                pause = FIRST_PAUSE_S * 2**unit.attempt * random.uniform(0.75, 1.25)
                timer = threading.Timer(pause, self._put, [replace(unit, attempt=unit.attempt + 1)])
                timer.daemon = True
                timer.start()
                return
            outcome = Outcome(None, "error", f"{outcome.detail}, after {unit.attempt} retries")
        unit.call.set(unit.place, unit.function, outcome)
        if unit.call.done.is_set():
            with self._lock:
                self._calls.discard(unit.call)

    def _spawn(self, lane: _Lane) -> RewardChild:
        with self._lock:  # close() must see every child
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            child = RewardChild(self._functions, self._memory_mb, lane.polls, self._timeout_s)
            self._children.add(child)
        try:
            child.wait_ready(self._startup_s)
        except BaseException:
            self._discard(child)
            raise
        return child

    def _discard(self, child: RewardChild | None) -> None:
        if child is None:
            return
        child.kill()
        child.release()
        with self._lock:
            self._children.discard(child)


class Call:
    """The outcomes of one batch of samples, collected as they arrive."""

    def __init__(self, samples: int, functions: int) -> None:
        self._outcomes: list[list[Outcome]] = [[Outcome(None, "none")] * functions for _ in range(samples)]
        self._left = samples * functions
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.done = threading.Event()
        if not self._left:
            self.done.set()

    def set(self, sample: int, function: int, outcome: Outcome) -> None:
        """Stores one outcome; call it once per sample and function."""
        with self._lock:
            self._outcomes[sample][function] = outcome
            self._left -= 1
            if self._left == 0:
                self.done.set()

    def fail(self, error: BaseException) -> None:
        """Ends the call with an error, unless it has already ended."""
        with self._lock:
            if not self.done.is_set():
                self._error = error
                self.done.set()

    def wait(self) -> list[list[Outcome]]:
        """Waits for all outcomes, or raises the error. Always returns: every function and every start has a deadline."""
        self.done.wait()
        if self._error is not None:
            raise self._error
        return self._outcomes


class _Closed(Exception):
    """The pool is closed."""


@dataclass(frozen=True)
class _Unit:
    """One function on one sample."""

    call: Call
    place: int  # of the sample in its call
    function: int
    sample: Sample
    attempt: int = 0
    alone: bool = False  # one of several units in a process that crashed


@dataclass(frozen=True)
class _Asked:
    unit: _Unit
    deadline: float


class _Lane:
    """A queue of units; at most `window` of them are in a process at a time."""

    def __init__(self, window: int, polls: bool = False) -> None:
        self.window, self.polls = window, polls
        self.queue: queue.Queue[_Unit | None] = queue.Queue()

    def next(self, waits: bool) -> _Unit | None:
        """The next unit; None if the queue is empty and `waits` is False. Raises _Closed once the pool is closed."""
        try:
            unit = self.queue.get(block=waits)
        except queue.Empty:
            return None
        if unit is None:
            raise _Closed
        return unit


class _Start:
    """The result of starting a thread's first process."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.is_async: list[bool] = []

    def wait(self) -> list[bool]:
        """Waits for the start; returns which functions are async, or raises the error."""
        self.ready.wait()
        if self.error is not None:
            raise self.error
        return self.is_async
