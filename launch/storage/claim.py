"""One process at a time writes into a folder. Imports nothing heavy."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.platform.config.schema import ConfigError


class CannotLock(RuntimeError):
    """The file system of a folder has no locks."""


@contextmanager
def claimed(folder: Path, setting: str = "run.dir", must_lock: bool = False, wait_s: float = 0.0) -> Iterator[int]:
    """A folder, made if need be, which no other process writes runs into during the body.

    The lock is that of the descriptor which is given; a child that inherits it holds the folder on.

    Args:
        setting: that names the folder, for messages. must_lock: raises CannotLock where a file system has no locks; else
            the folder is not locked there. wait_s: for another process that is about to end.

    Raises:
        ConfigError: another process does, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}={folder.parent}: the run's folder cannot be written: {error}") from error
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            _lock(descriptor, time.monotonic() + wait_s)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process trains into {folder}. Wait for it to end, or set another run.name or {setting}"
            ) from error
        except OSError as error:
            if must_lock:
                raise CannotLock(str(error)) from error
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
        else:
            return
