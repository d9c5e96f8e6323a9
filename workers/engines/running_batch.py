"""Shares one vLLM engine between several threads, whose requests run in one batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

Request = tuple[list[int], Any]
"""Prompt tokens and sampling parameters."""


class RunningBatch:
    """Threads with pending requests take turns: one thread at a time steps the engine for all requests.

    Only the thread whose turn it is uses the engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._busy = False  # whether a thread has the turn
        self._pausing = 0  # threads that wait to pause the engine
        self._arrived: list[tuple[str, Request]] = []  # not yet added to the engine
        self._done: dict[str, Any] = {}  # outputs or errors, until the thread that made the request takes them
        self._names = count()

    def run(self, requests: Sequence[Request]) -> list[Any]:
        """The finished outputs of these requests, in order; requests of other threads advance meanwhile."""
        with self._changed:
            names = [str(next(self._names)) for _ in requests]
            self._arrived += zip(names, requests, strict=True)
        try:
            while not self._finished(names):
                self._step_unless_finished(names)
        except BaseException:
            self._abandon(names)
            raise
        with self._changed:
            results = [self._done.pop(name) for name in names]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Runs the body while the engine takes no step; requests keep their state."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """Stops stepping until `resume`, which another thread may call."""
        with self._changed:
            # `_pausing` makes other threads wait; otherwise one that takes step after step could starve this thread.
            self._pausing += 1
            self._changed.wait_for(lambda: not self._busy)
            self._pausing -= 1
            self._busy = True

    def resume(self) -> None:
        """Allows steps again."""
        self._end_turn()

    def _step_unless_finished(self, names: Sequence[str]) -> None:
        """Waits until these requests are finished or the engine is free; in the latter case takes a step."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished(names) or not (self._busy or self._pausing))
            if self._finished(names):
                return
            self._busy = True
        try:
            self._step()
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _step(self) -> None:
        """Adds new requests to the engine, takes one step, and stores finished outputs."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
        for name, (ids, parameters) in arrived:
            try:
                self._engine.add_request(name, {"prompt_token_ids": ids}, parameters)
            except Exception as error:  # the thread that made the request raises it
                self._done[name] = error
        for output in self._engine.step():
            if output.finished:
                self._done[output.request_id] = output

    def _finished(self, names: Sequence[str]) -> bool:
        return all(name in self._done for name in names)

    def _abandon(self, names: Sequence[str]) -> None:
        """Drops the requests of a thread that failed or was interrupted."""
        with self.paused():
            self._arrived = [entry for entry in self._arrived if entry[0] not in names]
            self._engine.abort_request([name for name in names if name not in self._done])
            for name in names:
                self._done.pop(name, None)
