"""What SIGTERM, SIGHUP and Ctrl-C do to a run: they end it where its weights and its records fit together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tandem.platform.spans import Spans

UNINTERRUPTED = ("gradient_noise", "update", "update_critic", "update_actor", "publish", "record", "checkpoint")
"""Spans in which the weights move or records are written: the first signal waits until the step is done."""
CODES = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes, as a shell counts them."""


class Terminated(BaseException):
    """A signal asks the run to end; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)

    @property
    def code(self) -> int:
        """The exit code of the run."""
        return CODES[self.number]

    def __str__(self) -> str:
        return "interrupted (Ctrl-C)" if self.number is signal.SIGINT else f"terminated ({self.number.name})"


class Signals:
    """Raises `Terminated` in the main thread: at once, or when the step is done. The second signal never waits."""

    def __init__(self) -> None:
        self.spans = Spans()  # of the driver, once there is one
        self._has_come = False
        self._waiting: int | None = None
        self._is_ignoring = False

    def install(self) -> None:
        """Takes the signals over; one that is ignored, as under nohup, stays so."""
        for number in CODES:
            if signal.getsignal(number) is not signal.SIG_IGN:
                with suppress(ValueError):  # not in the main thread: the signals are not ours
                    signal.signal(number, self._arrived)

    @contextmanager
    def taken(self) -> Iterator[Signals]:
        """The signals are ours during the body."""
        before = {number: signal.getsignal(number) for number in CODES}
        self.install()
        try:
            yield self
        finally:
            for number, handler in before.items():
                with suppress(ValueError, TypeError):  # TypeError: it was not set by Python
                    signal.signal(number, handler)

    def ignore(self) -> None:
        """Whatever comes from here on changes nothing."""
        self._is_ignoring = True

    def raise_waiting(self) -> None:
        """Raises what came while the weights moved; called between steps."""
        if self._waiting is not None:
            raise Terminated(self._waiting)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._is_ignoring:
            return
        is_first, self._has_come = not self._has_come, True
        if is_first and self.spans.last in UNINTERRUPTED:
            self._waiting = number
            return
        raise Terminated(number)
