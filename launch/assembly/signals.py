"""What SIGTERM, SIGHUP and Ctrl-C do to a run: they end it where its weights and its records fit together."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tandem.platform.loop.spans import Spans

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


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raises `Terminated` for an error of the body that it has caused: compiled code that is interrupted, as Ray's, reports
    one of its own, and what is cleared up meanwhile may fail.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, Terminated):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise


class Signals:
    """Raises `Terminated` in the main thread while it is open to signals: at once, or when the step is done.

    What comes while it is closed waits for the next `open`. It closes by itself when it raises, so that what ends the run
    is not ended in turn; while the last step is saved it is open again, and the second signal does not wait.
    """

    def __init__(self) -> None:
        self.spans = Spans()  # of the driver, once there is one
        self._unanswered: list[int] = []
        self._is_open, self._is_first = False, True

    @contextmanager
    def taken(self) -> Iterator[Signals]:
        """The signals are ours during the body, and wait; one that is ignored, as under nohup, stays so."""
        before = {number: signal.getsignal(number) for number in CODES}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                with suppress(ValueError):  # not in the main thread: the signals are not ours
                    signal.signal(number, self._arrived)
        try:
            yield self
        finally:
            for number, handler in before.items():
                with suppress(ValueError, TypeError):  # TypeError: it was not set by Python
                    signal.signal(number, handler)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Open during the body. Who catches `Terminated` around it finds the signals closed, whatever ended it."""
        with unwrapped():
            try:
                self.open()
                yield
            finally:
                self.close()

    def open(self) -> None:
        """Signals raise from here on; raises one that has waited."""
        self._is_open = True
        self.raise_waiting()

    def close(self) -> None:
        """Signals wait from here on."""
        self._is_open = False

    def raise_waiting(self) -> None:
        """Raises what has waited; called between steps."""
        if self._unanswered:
            self._raise(self._unanswered[-1])

    def answered(self) -> None:
        """The first signal that was raised is being acted upon."""
        self._unanswered.pop(0)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self._unanswered.append(number)  # until it is answered: a library may swallow the exception
        is_first, self._is_first = self._is_first, False
        if self._is_open and not (is_first and self.spans.last in UNINTERRUPTED):
            self._raise(number)

    def _raise(self, number: int) -> None:
        self._is_open = False
        raise Terminated(number)
