"""A time limit for Python code that works in any thread, without signals."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class TimeIsUp(BaseException):
    """Raised inside the body of `time_limit`. Not an Exception, so that libraries do not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Ends the body by `TimeIsUp` at the first call or return after so many seconds of this thread's processor time.

    Time in which others have the processor does not count, so the outcome does not depend on how busy a machine is.
    A single long operation of the interpreter, as a power of huge numbers, is not interrupted. A profiler of this
    thread rests meanwhile.
    """
    deadline = time.thread_time() + seconds
    before = sys.getprofile()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if time.thread_time() > deadline:
            raise TimeIsUp

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
