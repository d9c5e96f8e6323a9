"""The pool's side of a reward process: the process, the socket to it, requests and answers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Container, Sequence
from typing import Any

from tandem.platform.rewards.functions import Outcome, RewardError
from tandem.platform.system.search_path import without_sources
from tandem.workers.cluster.private_cluster import TOKEN
from tandem.workers.isolation.frames import ProtocolError, new_nonce, receive, send

END_S = 7.0  # seconds for a process and its descendants to end
LARGEST_ANSWER = 2**24  # bytes
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


class RewardChild:
    """A reward process and the pool's end of the socket to it."""

    def __init__(self, functions: Sequence[str], memory_mb: int, is_concurrent: bool, timeout_s: float) -> None:
        self.is_async: list[bool] = []  # by function, once the process is ready
        self._channel, theirs = socket.socketpair()
        path = os.pathsep.join(without_sources(sys.path, os.environ.get("PYTHONPATH", "")))
        inherited = {name: value for name, value in os.environ.items() if name != TOKEN}  # it must not access Ray
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tandem.workers.isolation.reward_process"],
                stdin=theirs.fileno(),
                stdout=2,  # the log
                env={**inherited, **ONE_THREAD, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C does not reach it
            )
        self._start = {
            "functions": list(functions),
            "memory_mb": memory_mb,
            "pool": os.getpid(),
            "timeout_s": timeout_s if is_concurrent else None,
        }

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the functions are loaded; RewardError if loading fails."""
        nonce = self._send(json.dumps(self._start).encode(), timeout_s)
        try:
            answer = json.loads(receive(self._channel, [nonce], limit=LARGEST_ANSWER, timeout_s=timeout_s)[1])
        except TimeoutError:
            raise RewardError(f"a reward process did not start within {timeout_s:g} s") from None
        except EOFError:
            raise RewardError(f"a reward process ended while it started ({self.ending()})") from None
        except ProtocolError as error:
            raise RewardError(f"the file of a reward function wrote to the channel of its process: {error}") from None
        if answer["failed"] is not None:
            raise RewardError(answer["failed"])
        self.is_async = answer["async"]

    def ask(self, unit: Any, timeout_s: float) -> bytes:
        """Sends a unit; returns the nonce of its answer."""
        return self._send(pickle.dumps(unit), timeout_s)

    def has_said_something(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds; returns whether there is an answer to read or the process has ended."""
        return bool(select.select([self._channel], [], [], max(timeout_s, 0.0) if timeout_s < math.inf else None)[0])

    def answer(self, nonces: Container[bytes], timeout_s: float) -> tuple[bytes, Outcome]:
        """The nonce and outcome of the next answer; TimeoutError, EOFError if the process ended, or ProtocolError."""
        nonce, body = receive(self._channel, nonces, limit=LARGEST_ANSWER, timeout_s=timeout_s)
        return nonce, _as_outcome(body)

    def is_fit(self) -> bool:
        """Whether the process is alive and has sent no unrequested bytes."""
        self._channel.settimeout(0)
        try:
            self._channel.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except ConnectionError:
            pass
        return False

    def kill(self) -> None:
        """Ends the process and its descendants, and waits until they have ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
            self.process.send_signal(signal.SIGCONT)  # a function may have stopped it
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def release(self) -> None:
        """Closes the socket; only the owning thread may call this."""
        self._channel.close()

    def _send(self, body: bytes, timeout_s: float) -> bytes:
        nonce = new_nonce()
        with contextlib.suppress(ConnectionError, TimeoutError):  # waiting for the answer reports the failure
            send(self._channel, nonce, body, timeout_s)
        return nonce

    def ending(self) -> str:
        """How the process ended, after its socket has closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.kill()
        code = self.process.returncode
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _as_outcome(answer: bytes) -> Outcome:
    """An answer as an outcome; ProtocolError if it is not one."""
    try:
        value, problem, detail, pairs = json.loads(answer)
        steps = tuple((int(end), float(reward)) for end, reward in pairs)
        outcome = Outcome(None if value is None else float(value), problem, str(detail), steps)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"an answer that is not an outcome ({error})") from None
    if outcome.value is not None and not math.isfinite(outcome.value):
        raise ProtocolError("an answer that is not a finite number")
    return outcome
