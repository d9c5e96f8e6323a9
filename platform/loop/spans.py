"""Named spans of a step. The timing metric, the progress display and the docs use the same names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("generate", "score", "infer", "credit", "update", "publish")
"""The phases of a step, in order. `infer` and `update` are also split per role, as `infer_old`, `update_critic`, ..."""


class Spans:
    """Times the spans of a step; the times of a span that is entered twice add up."""

    def __init__(self, on_enter: Callable[[str], None] = lambda name: None) -> None:
        self._on_enter = on_enter
        self.last = ""  # the span entered last
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Times the body under `name`."""
        self.last = name
        self._on_enter(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def mark(self, name: str) -> None:
        """Sets `last` without timing anything."""
        self.last = name

    def take(self) -> dict[str, float]:
        """Returns the spans so far as `time/<name>_s` in seconds, and resets them."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}_s": value for name, value in seconds.items()}
