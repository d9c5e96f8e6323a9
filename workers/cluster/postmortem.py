"""Reads the log of a worker that died or hangs, for error messages."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tandem.platform.loop.protocols import TrainingError

LINES = 20
TAIL_BYTES = 64 * 2**10
ASK_TIMEOUT_S = 10.0
DUMP_S = 1.0  # seconds a worker gets to write its stacks

NO_MEMORY = (
    *("can't allocate memory", "out of memory", "OutOfMemoryError", "MemoryError", "Cannot allocate memory", "bad_alloc"),
    "for lack of memory",  # in tandem's messages about killed processes
)
"""Phrases by which torch, CUDA, Python, the kernel, Ray's memory monitor and tandem report a (possible) lack of memory."""


class WorkerFailed(RuntimeError):
    """A worker died, hung or raised; the message names the worker, its node, the call and the likely cause."""


def is_the_users(error: BaseException) -> bool:
    """Whether the user can fix an error from its message alone, without a traceback."""
    return isinstance(error, ValueError | TrainingError) and type(error).__module__.startswith("tandem.")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, of this process or reported for a worker, is or may be a lack of memory."""
    return isinstance(error, MemoryError) or any(words in f"{type(error).__name__}: {error}" for words in NO_MEMORY)


def last_words(node_id: str, pid: int, stacks: bool) -> str:
    """The tail of a worker's log as text for an error message; with `stacks`, the worker first writes its stacks to it.

    Empty if the log cannot be read: an error here must never hide the failure being reported.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        on_its_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_its_node)(_read)  # type: ignore[call-overload]
        lines = ray.get(task.remote(pid, stacks), timeout=ASK_TIMEOUT_S)
    except Exception:
        return ""
    return (
        "\n" + "\n".join([f"The last lines of its log (process {pid}):", *(f"  | {line}" for line in lines)])
        if lines
        else ""
    )


def _read(pid: int, stacks: bool) -> list[str]:
    """The tail of the log of process `pid`; runs on the worker's node."""
    if stacks:
        try:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(DUMP_S)
        except ProcessLookupError:
            pass
    return tail(logs_folder(), pid)


def logs_folder() -> Path:
    """Ray's log folder for the workers of this node."""
    import ray

    node: Any = ray._private.worker._global_node
    return Path(node.get_logs_dir_path())


def tail(folder: Path, pid: int) -> list[str]:
    """The last lines of a process's standard output and standard error, in this order, without Ray's own markers."""
    lines: list[str] = []
    for kind in ("out", "err"):
        for path in folder.glob(f"worker-*-{pid}.{kind}"):
            lines += last_lines(path)[-LINES:]
    return [line for line in lines if line.strip() and not line.startswith(":")][-2 * LINES :]


def last_lines(path: Path) -> list[str]:
    """The whole lines in the last 64 KiB of a file. Reads no more, since a log may have any size."""
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
        return lines[1:] if start else lines
