"""Locks a folder for one writing process at a time. Imports nothing heavy."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.platform.config.schema import ConfigError


class CannotLock(RuntimeError):
    """The file system of a folder does not support locks."""


@contextmanager
def claimed(folder: Path, setting: str = "run.dir", must_lock: bool = False, wait_s: float = 0.0) -> Iterator[int]:
    """Creates the folder if needed, and locks it against other runs during the body. Yields the locked file descriptor.

    A child process that inherits the descriptor keeps the lock.

    Args:
        setting: the setting that names the folder, for messages. must_lock: whether to raise CannotLock if the file system
            has no locks; otherwise the folder is then not locked. wait_s: seconds to wait for another process to end.

    Raises:
        ConfigError: another process holds the lock, or the folder cannot be created.
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
