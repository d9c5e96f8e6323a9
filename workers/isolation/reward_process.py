"""The process that runs reward functions for `reward_pool.RewardPool`.

Started as `python -m tandem.workers.isolation.reward_process` with a socket as its standard input. The process is a
keeper: it runs no user code. It forks a runner, which loads the functions and answers on the socket, and it copies the
functions' output to the log. When the runner or the pool's thread ends, the keeper ends all processes that the functions
have started. It finds them all because it is a child subreaper: the kernel makes it the parent of processes whose own
parent has ended.

The module imports little, so a replacement process starts in a tenth of a second.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import psutil

from tandem.platform.rewards.functions import (
    TRANSIENT,
    Outcome,
    RewardError,
    RewardFunction,
    Sample,
    check_value,
    is_async,
    is_transient,
    resolve,
)
from tandem.platform.system.search_path import users_set_aside
from tandem.platform.system.terminal import say, shown
from tandem.platform.system.user_code import describe_exception
from tandem.workers.isolation.frames import HEADER, frame, receive, send

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 24, 36
CAP_SYS_RESOURCE = 24
CAPABILITIES_V3 = 0x20080522
KEPT_CHARACTERS = 1024  # kept from the beginning and from the end of a process's output
KEPT_BYTES = 8 * KEPT_CHARACTERS  # searched for secrets; more than is kept, so that no secret is cut in two
END_S = 5.0  # seconds for descendants to end

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Forks the runner, waits until the runner or the pool ends, and exits with the runner's status."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    nonce, body = receive(channel)
    start: dict[str, Any] = json.loads(body)
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != start["pool"]:  # the pool died before PDEATHSIG was set
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keeper = _Keeper()
    output, theirs = os.pipe()
    keeper_id = os.getpid()
    runner = os.fork()
    if not runner:
        keeper.forget()
        os.close(output)
        _run(channel, nonce, start, theirs, keeper_id)
    channel.close()
    os.close(theirs)
    _end_as(keeper.wait(runner, output))


class _Keeper:
    """Waits for the runner, copies its output to the log, and ends its descendants."""

    def __init__(self) -> None:
        self._ends = False
        self._status: int | None = None
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._told_to_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes `wait`
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})

    def forget(self) -> None:
        """Undoes the keeper's setup in the runner."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.close(self._woken)
        os.close(self._wakes)

    def wait(self, runner: int, output: int) -> int:
        """The wait status of the runner, once the runner and its descendants have ended."""
        os.set_blocking(output, False)
        printed = _Printed()
        is_open = True
        while self._status is None and not self._ends:
            ready, _, _ = select.select([self._woken, *([output] if is_open else [])], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
            if output in ready:
                is_open = printed.read(output)
            self._reap(runner)
        deadline = time.monotonic() + END_S
        while self._reap(runner) and time.monotonic() < deadline:
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
            time.sleep(0.001)
        while is_open and select.select([output], [], [], 0)[0]:
            is_open = printed.read(output)
        printed.end()
        return self._status or 0

    def _reap(self, runner: int) -> bool:
        """Collects the exit codes of children that have ended; returns whether any children are left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == runner:
                    self._status = ended[1]
        except ChildProcessError:
            return False
        return True

    def _told_to_end(self, *_: Any) -> None:
        self._ends = True


class _Printed:
    """Writes the beginning and the end of the functions' output to the log, without secrets, and counts the rest."""

    def __init__(self) -> None:
        self._head, self._tail = b"", b""
        self._room = KEPT_CHARACTERS  # for the beginning
        self._after = 0  # bytes after the beginning

    def read(self, source: int) -> bool:
        """Reads available output; returns False at the end."""
        data = os.read(source, 2**16)
        if self._room > 0:
            self._head += data
            whole, newline, _ = self._head.rpartition(b"\n")
            if newline or len(self._head) >= KEPT_BYTES:
                self._write_head((whole + newline) or self._head)
        else:
            self._add_to_tail(data)
        return bool(data)

    def end(self) -> None:
        """Writes the end of the output and how much is left out."""
        self._write_head(self._head)
        text = shown(self._tail.decode(errors="replace"))[-KEPT_CHARACTERS:]
        left_out = self._after - len(text.encode())
        if left_out > 0:
            self._write(f"\n... about {left_out} bytes that reward functions printed are left out ...\n")
        self._write(text)

    def _write_head(self, data: bytes) -> None:
        self._head = self._head[len(data) :]
        text = shown(data[:KEPT_BYTES].decode(errors="replace"))
        self._write(text[: self._room])
        rest = text[self._room :].encode() + data[KEPT_BYTES:]
        self._room -= len(text)
        if self._room <= 0:
            self._add_to_tail(rest + self._head)
            self._head = b""

    def _add_to_tail(self, data: bytes) -> None:
        self._after += len(data)
        self._tail = (self._tail + data)[-KEPT_BYTES:]

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the log may be closed
            os.write(2, text.encode())


def _end_as(status: int) -> NoReturn:
    """Ends this process with the exit code or signal in a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _run(channel: socket.socket, nonce: bytes, start: dict[str, Any], output: int, keeper: int) -> NoReturn:
    """The runner's main function: loads the functions, reports success, and serves until the pool closes the channel."""
    code = 1
    try:
        os.setsid()  # keeps signals that a function sends to its process group from the keeper
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.register_at_fork(after_in_child=channel.close)
        _give_up(CAP_SYS_RESOURCE)
        _limit(resource.RLIMIT_AS, start["memory_mb"] * 2**20)
        try:
            functions = [resolve(spec) for spec in start["functions"]]
        except RewardError as error:
            hint = " (reward.memory_limit_mb bounds imports too)" if isinstance(error.__cause__, MemoryError) else ""
            _answer(channel, nonce, {"failed": f"{error}{hint}"})
        else:
            _answer(channel, nonce, {"failed": None, "async": [is_async(function) for _, function in functions]})
            if start["timeout_s"] is None:
                _serve(channel, functions)
            else:
                asyncio.run(_serve_concurrently(channel, functions, start["timeout_s"]))
        code = 0
    except EOFError:  # the pool has closed the channel
        code = 0
    except BaseException as error:
        say(describe_exception(error), error=True)
    sys.stdout.flush()
    os._exit(code)


Functions = Sequence[tuple[str, RewardFunction]]


def _serve(channel: socket.socket, functions: Functions) -> None:
    """Runs units in order of arrival, one at a time."""
    while True:
        nonce, body = receive(channel)
        name, function, sample = _unit(body, functions)
        runner = os.getpid()
        try:
            outcome = _checked(name, sample, function(sample))
        except BaseException as error:
            outcome = _failure(error, function)
        if os.getpid() != runner:  # the function has forked and returned in the child
            os._exit(0)
        _answer(channel, nonce, _as_message(outcome))


async def _serve_concurrently(channel: socket.socket, functions: Functions, timeout_s: float) -> None:
    """Runs async units concurrently; cancels a unit that takes too long, without effect on the others."""
    reader, writer = await asyncio.open_connection(sock=channel)
    runner = os.getpid()

    async def run(nonce: bytes, name: str, function: RewardFunction, sample: Sample) -> None:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                outcome = _checked(name, sample, await function(sample))
        except BaseException as error:
            late = limit.expired()
            outcome = Outcome(None, "timeout", f"took over {timeout_s:g} s") if late else _failure(error, function)
        if os.getpid() != runner:  # the function has forked and returned in the child
            os._exit(0)
        writer.write(frame(nonce, json.dumps(_as_message(outcome)).encode()))

    running: set[asyncio.Task[None]] = set()
    while True:
        try:
            nonce, size = HEADER.unpack(await reader.readexactly(HEADER.size))
            body = await reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EOFError from None
        task = asyncio.create_task(run(nonce, *_unit(body, functions)))
        running.add(task)
        task.add_done_callback(running.discard)


def _unit(body: bytes, functions: Functions) -> tuple[str, RewardFunction, Sample]:
    """The name and function of a unit, and its sample."""
    with users_set_aside():  # unpickling may import a module, for example for dates in a row
        number, sample = pickle.loads(body)
    return *functions[number], sample


def _checked(name: str, sample: Sample, value: Any) -> Outcome:
    try:
        return check_value(name, sample, value)
    except Exception as error:
        return Outcome(None, "invalid", str(error))


def _failure(error: BaseException, function: RewardFunction) -> Outcome:
    """The outcome of a function that raised an error."""
    if isinstance(error, MemoryError):  # treated as if the process had been killed, so one sample cannot stop a run
        return Outcome(None, "crash", describe_exception(error))
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    return Outcome(None, TRANSIENT if is_transient(error) else "error", describe_exception(error, file))


def _as_message(outcome: Outcome) -> list[Any]:
    return [outcome.value, outcome.problem, outcome.detail, outcome.steps]


def _answer(channel: socket.socket, nonce: bytes, message: Any) -> None:
    send(channel, nonce, json.dumps(message).encode())


def _limit(kind: int, value: int) -> None:
    """Sets the soft and the hard limit, so the limit cannot be raised again."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _give_up(capability: int) -> None:
    """Drops a superuser capability for this process and its descendants; see capabilities(7)."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; three for numbers below 32, then three for the rest
    _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if _libc.capget(header, sets) == 0:
        for place in range(3):
            sets[place] &= ~(1 << capability)
        _libc.capset(header, sets)


if __name__ == "__main__":
    main()
