"""Handles SIGTERM, SIGHUP and Ctrl-C: they end a run at a point where its weights and records are consistent."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tandem.platform.loop.spans import Spans

UNINTERRUPTED = ("gradient_noise", "update", "update_critic", "update_actor", "publish", "record", "checkpoint")
"""Spans that change weights or write records. If the first signal arrives in one of them, it waits for the step's end."""
CODES = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes, following the shell's convention."""


class Terminated(BaseException):
    """A signal asks the run to end; `number` is the signal."""

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
    """Raises `Terminated` in place of an error of the body that it caused. Interrupted compiled code, such as Ray's, raises
    an error of its own, and cleanup after an interruption may fail.
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
    """Raises `Terminated` in the main thread while open to signals: at once, or when the step is done.

    Signals that arrive while it is closed wait for the next `open`. Raising closes it, so the cleanup is not interrupted.
    It is opened again while the last step is saved, and the second signal then raises at once.
    """

    def __init__(self) -> None:
        self.spans = Spans()  # replaced by the driver's spans
        self._unanswered: list[int] = []
        self._is_open, self._is_first = False, True

    @contextmanager
    def taken(self) -> Iterator[Signals]:
        """Installs handlers, closed at first, during the body. A signal that is ignored, as under nohup, stays ignored."""
        before = {number: signal.getsignal(number) for number in CODES}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                with suppress(ValueError):  # not in the main thread, where handlers cannot be set
                    signal.signal(number, self._arrived)
        try:
            yield self
        finally:
            for number, handler in before.items():
                with suppress(ValueError, TypeError):  # TypeError: the handler was not set by Python
                    signal.signal(number, handler)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Opens it during the body and always closes it afterwards, so code that catches `Terminated` finds it closed."""
        with unwrapped():
            try:
                self.open()
                yield
            finally:
                self.close()

    def open(self) -> None:
        """Lets signals raise; raises a waiting signal at once."""
        self._is_open = True
        self.raise_waiting()

    def close(self) -> None:
        """Makes signals wait."""
        self._is_open = False

    def raise_waiting(self) -> None:
        """Raises a waiting signal; called between steps."""
        if self._unanswered:
            self._raise(self._unanswered[-1])

    def answered(self) -> None:
        """Removes the oldest signal from the waiting signals, because it is being handled."""
        self._unanswered.pop(0)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self._unanswered.append(number)  # kept until `answered`: a library may swallow the exception
        is_first, self._is_first = self._is_first, False
        if self._is_open and not (is_first and self.spans.last in UNINTERRUPTED):
            self._raise(number)

    def _raise(self, number: int) -> None:
        self._is_open = False
        raise Terminated(number)
