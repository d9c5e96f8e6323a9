"""Lets one run at a time write checkpoints into a place: by a file lock if the file system has locks, else by a lease.

A lease is a small object beside the checkpoints that its holder rewrites every few seconds. To take a lease, a run writes
its own object and then lists all leases. If two runs do so at once, at least one sees the other, and a run that sees
another backs off. No clocks are compared: if a lease's content has not changed for `DEAD_AFTER_S`, its holder is dead.
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
ATTEMPTS = 5  # to take a lease when several runs start at the same time
PREFIX = ".lease-"


class LeaseLost(CheckpointError):
    """Another run writes to this place."""


class Lease:
    """The right to write checkpoints below `root`; `note` shows a line when `take` has to wait."""

    def __init__(self, fs: Any, root: str, note: Callable[[str], None]) -> None:
        self._fs, self._root, self._note = fs, root, note
        self._path = f"{root}/{PREFIX}{uuid.uuid4().hex}.json"
        self._renewals = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def take(self) -> None:
        """Takes the lease if it is free or its holder has died.

        Raises:
            ConfigError: another run holds the lease.
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
        """Releases the lease."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._remove(self._path)

    def check(self) -> None:
        """Raises LeaseLost if another run has taken over, for example after a long network outage."""
        others = self._others()
        if others or not self._fs.exists(self._path):
            who = _holder(next(iter(others.values()), b""))
            raise LeaseLost(f"another run has taken over {self._root} while this run could not renew its lease{who}")

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_S):
            # Network errors are retried at the next renewal. A lease that was taken over is not written again.
            with suppress(Exception):
                self._fs.invalidate_cache()
                if self._fs.exists(self._path):
                    self._write()

    def _wait_for_the_end_of(self, others: dict[str, bytes]) -> None:
        """Waits until the holders of other leases are dead; ConfigError as soon as a holder renews its lease."""
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
        """The leases of other runs, by path."""
        self._fs.invalidate_cache()
        leases = {}
        for path in map(str, self._fs.ls(self._root, detail=False)):
            if path.rpartition("/")[2].startswith(PREFIX) and path.rpartition("/")[2] != self._path.rpartition("/")[2]:
                with suppress(FileNotFoundError):  # released meanwhile
                    leases[path] = self._fs.cat_file(path)
        return leases

    def _write(self) -> None:
        self._renewals += 1
        self._fs.pipe_file(self._path, json.dumps({**_this_process(), "renewals": self._renewals}).encode())

    def _remove(self, path: str) -> None:
        with suppress(OSError):
            self._fs.rm_file(path)


@contextmanager
def only_writer(fs: Any, root: str, note: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Makes this run the only writer of checkpoints below `root` during the body.

    Yields a function that raises `LeaseLost` if another run has taken over.

    Raises:
        ConfigError: another run writes there, or the place cannot be written.
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
    except Exception as error:  # each kind of storage raises its own errors
        raise ConfigError(
            f"{root}: checkpoints cannot be written there: {error}. Set checkpoint.dir to a writable place"
        ) from error
    try:
        yield lease.check
    finally:
        with suppress(Exception):
            lease.give_back()


def _this_process() -> dict[str, Any]:
    """The identity of this process, unique over all machines."""
    process = psutil.Process()
    return {"host": os.uname().nodename, "pid": process.pid, "started": process.create_time(), "pids_of": _pids_of()}


def _pids_of() -> str:
    """The scope of process ids: this boot of this machine, and the pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex  # equal to no other scope


def _has_died_here(content: bytes) -> bool:
    """Whether the holder was a process in the same pid scope as this one, and is gone."""
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
    """A description of a lease's holder, for messages."""
    try:
        holder = json.loads(content)
        return f" (process {int(holder['pid'])} on {holder['host']})"
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
