"""One run at a time writes checkpoints into a place: by a lock where the system has one, else by a lease.

A lease is a small object beside the checkpoints that its holder writes again every few seconds. Who wants one writes its
own object and then lists all: of two that do so at once, at least one sees the other, and who sees another steps back. No
clocks are compared: a lease whose content has not changed for `DEAD_AFTER_S` is one whose holder has died.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from fsspec.implementations.local import LocalFileSystem

from tandem.launch.storage.checkpoint import CheckpointError
from tandem.launch.storage.claim import CannotLock, claimed
from tandem.platform.config.schema import ConfigError

RENEWED_S = 10.0
DEAD_AFTER_S = 60.0
ATTEMPTS = 5  # of several that begin at the same time
PREFIX = ".lease-"


class LeaseLost(CheckpointError):
    """Another run writes here."""


class Lease:
    """The right to write checkpoints below `root`; `note` is told what is waited for."""

    def __init__(self, fs: Any, root: str, note: Callable[[str], None]) -> None:
        self._fs, self._root, self._note = fs, root, note
        self._path = f"{root}/{PREFIX}{uuid.uuid4().hex}.json"
        self._renewals = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def take(self) -> None:
        """Takes the lease, from a holder that has died too.

        Raises:
            ConfigError: another run holds it.
        """
        for _ in range(ATTEMPTS):
            self._write()
            others = self._others()
            if not others:
                self._thread.start()
                return
            self._remove(self._path)
            self._wait_for_the_end_of(others)
            time.sleep(random.uniform(0, RENEWED_S / 20))
        raise ConfigError(f"{self._root}: other runs want to write checkpoints there at the same time. Try again")

    def give_back(self) -> None:
        """Others may write from here on."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._remove(self._path)

    def check(self) -> None:
        """LeaseLost if another run has taken the place over, as after a long loss of the network."""
        others = self._others()
        if others or not self._fs.exists(self._path):
            who = _holder(next(iter(others.values()), b""))
            raise LeaseLost(f"another run has taken over {self._root}, while this one could not be seen{who}")

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_S):
            # Without the network it is tried again; a lease that was taken over is not brought back.
            with suppress(Exception):
                self._fs.invalidate_cache()
                if self._fs.exists(self._path):
                    self._write()

    def _wait_for_the_end_of(self, others: dict[str, bytes]) -> None:
        """Returns once their holders have ended; ConfigError as soon as one shows that it lives."""
        self._note(f"waiting up to {DEAD_AFTER_S:g} s: a run may be writing checkpoints into {self._root}")
        deadline = time.monotonic() + DEAD_AFTER_S
        while time.monotonic() < deadline and not all(map(_has_died_here, others.values())):
            time.sleep(min(1.0, RENEWED_S / 10))
            seen = self._others()
            others = {path: content for path, content in others.items() if path in seen}
            for path, content in others.items():
                if seen[path] != content:
                    raise ConfigError(
                        f"another run writes checkpoints into {self._root}{_holder(content)}. Wait for it to end, or set "
                        "another run.name or checkpoint.dir"
                    )
        for path in others:
            self._remove(path)

    def _others(self) -> dict[str, bytes]:
        """The leases of others, by path."""
        self._fs.invalidate_cache()
        found = {}
        for path in map(str, self._fs.ls(self._root, detail=False)):
            if path.rpartition("/")[2].startswith(PREFIX) and path.rpartition("/")[2] != self._path.rpartition("/")[2]:
                with suppress(FileNotFoundError):  # given back meanwhile
                    found[path] = self._fs.cat_file(path)
        return found

    def _write(self) -> None:
        self._renewals += 1
        self._fs.pipe_file(self._path, json.dumps({**_this_process(), "renewals": self._renewals}).encode())

    def _remove(self, path: str) -> None:
        with suppress(OSError):
            self._fs.rm_file(path)


@contextmanager
def only_writer(fs: Any, root: str, note: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """For the body, no other run writes checkpoints below `root`.

    Yields a function that raises `LeaseLost` once that is no longer so.

    Raises:
        ConfigError: another run does, or the place cannot be written.
    """
    if isinstance(fs, LocalFileSystem):
        with suppress(CannotLock), claimed(Path(root), "checkpoint.dir", must_lock=True):
            yield lambda: None
            return
    lease = Lease(fs, root, note)
    try:
        fs.makedirs(root, exist_ok=True)
        lease.take()
    except ConfigError:
        raise
    except Exception as error:  # every kind of storage has errors of its own
        raise ConfigError(
            f"{root}: checkpoints cannot be written there: {error}. Set checkpoint.dir to a place that can"
        ) from error
    try:
        yield lease.check
    finally:
        with suppress(Exception):
            lease.give_back()


def _this_process() -> dict[str, Any]:
    """What tells this process from all others, and where it is."""
    own = psutil.Process()
    return {"host": os.uname().nodename, "pid": own.pid, "started": own.create_time(), "pids_of": _pids_of()}


def _pids_of() -> str:
    """Within what process numbers mean something: this boot of this machine, and its namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex  # none that another could have


def _has_died_here(content: bytes) -> bool:
    """Whether the holder was a process that this one could see, and is gone."""
    try:
        holder = json.loads(content)
        if holder["pids_of"] != _pids_of():
            return False
        return psutil.Process(int(holder["pid"])).create_time() != holder["started"]
    except psutil.NoSuchProcess:
        return True
    except (ValueError, TypeError, KeyError, RecursionError, psutil.Error):
        return False


def _holder(content: bytes) -> str:
    """Who holds a lease, to be put into a message."""
    try:
        holder = json.loads(content)
        return f" (process {int(holder['pid'])} on {holder['host']})"
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
