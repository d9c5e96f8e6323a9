"""One vLLM engine shared by several threads, whose requests run in one batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

Request = tuple[list[int], Any]
"""Prompt tokens and how they are sampled."""


class RunningBatch:
    """Of the threads that wait for requests, one at a time steps the engine for all of them.

    The engine itself is touched by one thread at a time: the one whose turn it is.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._busy = False  # whether it is some thread's turn
        self._pausing = 0  # threads that want the engine to stand still
        self._arrived: list[tuple[str, Request]] = []  # not yet given to the engine
        self._done: dict[str, Any] = {}  # outputs, or why there is none, until their owner takes them
        self._names = count()

    def run(self, requests: Sequence[Request]) -> list[Any]:
        """The finished outputs of these requests, in order; meanwhile requests of other threads move on too."""
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
        """No step runs during the body; requests stay where they are."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """No step runs from here on until `resume`, which another thread may call."""
        with self._changed:
            # Counted, or a thread that takes step after step would never leave the engine to this one.
            self._pausing += 1
            self._changed.wait_for(lambda: not self._busy)
            self._pausing -= 1
            self._busy = True

    def resume(self) -> None:
        """Steps may run again."""
        self._end_turn()

    def _step_unless_finished(self, names: Sequence[str]) -> None:
        """Waits until these requests are finished, or the engine is free to take a step for them."""
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
        """Gives the engine what has arrived, lets it take a step, and keeps what is finished."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
        for name, (ids, parameters) in arrived:
            try:
                self._engine.add_request(name, {"prompt_token_ids": ids}, parameters)
            except Exception as error:  # its owner's to raise, who may be another thread
                self._done[name] = error
        for output in self._engine.step():
            if output.finished:
                self._done[output.request_id] = output

    def _finished(self, names: Sequence[str]) -> bool:
        return all(name in self._done for name in names)

    def _abandon(self, names: Sequence[str]) -> None:
        """Drops all that is left of the requests of a thread that failed or was interrupted."""
        with self.paused():
            self._arrived = [entry for entry in self._arrived if entry[0] not in names]
            self._engine.abort_request([name for name in names if name not in self._done])
            for name in names:
                self._done.pop(name, None)
