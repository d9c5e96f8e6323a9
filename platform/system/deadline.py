"""A time limit for Python code. Works in any thread, without signals."""

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
    """Raises `TimeIsUp` in the body at the first call or return after `seconds` of this thread's processor time.

    Only this thread's processor time counts, so the outcome does not depend on the load of the machine. A single long
    operation of the interpreter, such as a power of huge numbers, is not interrupted. A profiler of this thread is
    suspended in the body.
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
