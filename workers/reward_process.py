"""A process that runs reward functions for `sandbox.RewardPool`, one sample after the other.

Started as `python -m tandem.workers.reward_process FD PARENT_PID MEMORY_MB FUNCTION...`. FD is a stream socket: chunks
of samples come in (8 bytes of length, pickle), a JSON line goes out after each function and sample. Imports stay few,
so that a replacement is up in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Sequence
from typing import Any

from tandem.platform.rewards import (
    Outcome,
    RewardError,
    RewardFunction,
    Sample,
    check_value,
    describe_exception,
    resolve,
)
from tandem.platform.search_path import users_set_aside

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Loads the functions, says so, and serves chunks until the other end closes."""
    fd, parent, memory_mb = (int(argument) for argument in sys.argv[1:4])
    os.set_inheritable(fd, False)
    os.dup2(sys.stderr.fileno(), 1)  # what functions print goes to the log
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _die_with(parent)
    _limit(resource.RLIMIT_AS, memory_mb * 2**20)
    _limit(resource.RLIMIT_CORE, 0)
    try:
        functions = [resolve(spec) for spec in sys.argv[4:]]
    except RewardError as error:
        hint = " (reward.memory_limit_mb bounds imports too)" if isinstance(error.__cause__, MemoryError) else ""
        _send(fd, {"failed": f"{error}{hint}"})
        return
    _send(fd, {"failed": None})
    while (chunk := _receive(fd)) is not None:
        _serve(fd, functions, *chunk)


def _serve(fd: int, functions: Sequence[tuple[str, RewardFunction]], samples: Sequence[Sample], first: int) -> None:
    """Runs unit after unit from `first` on; unit u is function u % F on sample u // F."""
    for unit in range(first, len(samples) * len(functions)):
        sample, (name, function) = samples[unit // len(functions)], functions[unit % len(functions)]
        outcome = _outcome(name, function, sample)
        _send(fd, [outcome.value, outcome.problem, outcome.detail, outcome.steps])


def _outcome(name: str, function: RewardFunction, sample: Sample) -> Outcome:
    try:
        value = function(sample)
    except MemoryError as error:  # one greedy sample must not stop a run: as if the process had been killed
        return Outcome(None, "crash", describe_exception(error))
    except BaseException as error:
        file = getattr(getattr(function, "__code__", None), "co_filename", None)
        return Outcome(None, "error", describe_exception(error, file))
    try:
        return check_value(name, sample, value)
    except Exception as error:
        return Outcome(None, "invalid", str(error))


def _die_with(parent: int) -> None:
    """Asks the kernel to kill this process with the thread that started it, even while a function holds the GIL."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _send(fd: int, message: Any) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(fd, data) :]


def _receive(fd: int) -> Any:
    header = _read(fd, 8)
    body = header and _read(fd, int.from_bytes(header, "big"))
    with users_set_aside():  # a row may hold dates, whose module is loaded now
        return pickle.loads(body) if body else None


def _read(fd: int, count: int) -> bytes | None:
    """Exactly `count` bytes, or None once the other end has closed."""
    data = bytearray()
    while len(data) < count:
        part = os.read(fd, min(count - len(data), 2**20))
        if not part:
            return None
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
