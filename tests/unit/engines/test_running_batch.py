"""One engine shared by threads: one batch, one thread at a time, and each thread gets its own results and errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.workers.engines.running_batch import RunningBatch


class Engine:
    """Finishes a request after as many steps as it has tokens; detects use by two threads at once."""

    def __init__(self, pace: float = 0.002) -> None:
        self.running: dict[str, int] = {}
        self.together: set[frozenset[str]] = set()
        self.aborted: list[str] = []
        self.fail_at: int | None = None
        self.steps, self.pace, self._inside = 0, pace, threading.Lock()

    def add_request(self, name: str, prompt: dict[str, list[int]], parameters: Any) -> None:
        assert self._inside.acquire(blocking=False)
        try:
            if parameters == "bad":
                raise ValueError("a prompt too long")
            self.running[name] = len(prompt["prompt_token_ids"])
        finally:
            self._inside.release()

    def step(self) -> list[Any]:
        assert self._inside.acquire(blocking=False), "two threads in the engine"
        try:
            time.sleep(self.pace)
            self.steps += 1
            if self.steps == self.fail_at:
                raise RuntimeError("out of memory")
            self.together.add(frozenset(self.running))
            self.running = {name: left - 1 for name, left in self.running.items()}
            done = [name for name, left in self.running.items() if left == 0]
            for name in done:
                del self.running[name]
            return [SimpleNamespace(request_id=name, finished=True) for name in done]
        finally:
            self._inside.release()

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self.running.pop(name, None)


def requests(*lengths: int) -> list[tuple[list[int], Any]]:
    return [([0] * length, None) for length in lengths]


@contextmanager
def under_way(engine: Engine, batch: RunningBatch, length: int) -> Iterator[Future[list[Any]]]:
    """A request of another thread that the engine is already running."""
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(batch.run, requests(length))
        while not engine.running:
            time.sleep(0.001)
        yield other


def test_outputs_come_in_order_of_the_requests() -> None:
    batch = RunningBatch(Engine())
    assert [one.request_id for one in batch.run(requests(5, 1, 3))] == ["0", "1", "2"]
    assert [one.request_id for one in batch.run(requests(1))] == ["3"]
    assert batch.run([]) == []


def test_calls_of_several_threads_run_in_one_batch() -> None:
    engine = Engine()
    batch = RunningBatch(engine)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda length: batch.run(requests(length, 3)), (40, 45, 50, 55)))
    assert sorted(int(one.request_id) for part in results for one in part) == list(range(8))
    assert max(len(names) for names in engine.together) >= 4  # one after the other, they would take 2
    assert engine.steps < 40 + 45 + 50 + 55
    assert not engine.running


def test_a_call_that_comes_later_does_not_wait_for_the_earlier_one() -> None:
    engine = Engine()
    batch = RunningBatch(engine)
    with under_way(engine, batch, 200) as long:
        batch.run(requests(3))
        assert not long.done()
        long.result()


def test_a_refused_request_is_its_owners_error() -> None:
    engine = Engine()
    batch = RunningBatch(engine)
    with under_way(engine, batch, 30) as good:
        with pytest.raises(ValueError, match="too long"):
            batch.run([*requests(2), ([0], "bad")])
        assert len(good.result()) == 1
    assert len(batch.run(requests(2))) == 1


def test_a_failed_step_ends_its_call_and_leaves_the_engine_to_others() -> None:
    engine = Engine()
    batch = RunningBatch(engine)
    engine.fail_at = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        batch.run(requests(5, 6))
    assert engine.aborted == ["0", "1"]
    assert len(batch.run(requests(2))) == 1


def test_nothing_runs_while_paused_and_pausing_need_not_wait_for_the_end() -> None:
    engine = Engine()
    batch = RunningBatch(engine)
    with under_way(engine, batch, 300) as long:
        for _ in range(5):
            with batch.paused():
                before = engine.steps
                time.sleep(0.02)
                assert engine.steps == before
        assert not long.done()
        assert len(long.result()) == 1
