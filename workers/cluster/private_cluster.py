"""Keeps a private Ray private: it listens on the loopback alone, asks for a token, and no one else can read its files.

Processes of one user can read each other's environment, and other users' cannot. So the token is an environment variable:
it lies in no file and in no command line, and ends with the processes that have it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tandem.platform.config.schema import ConfigError

LOOPBACK = "127.0.0.1"
TOKEN = "RAY_AUTH_TOKEN"
LONGEST_SOCKET = 107  # bytes of the path of a unix socket
_SOCKET = "r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # as Ray names its longest
REMOVED_WITHIN_S = 5.0


@contextmanager
def session_folder() -> Iterator[Path]:
    """A folder for Ray's files that no other user can enter; removed after the body.

    Raises:
        ConfigError: RAY_TMPDIR cannot be written, or its path is too long.
    """
    above = os.environ.get("RAY_TMPDIR", "/tmp")
    try:
        os.makedirs(above, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="tandem-", dir=above))
    except OSError as error:
        raise ConfigError(
            f"RAY_TMPDIR={above}: Ray's files cannot be written there: {error}. Set another folder"
        ) from error
    try:
        if (excess := len(os.fsencode(folder / _SOCKET)) - LONGEST_SOCKET) > 0:
            raise ConfigError(
                f"RAY_TMPDIR={above} is {excess} bytes too long: Ray's sockets lie in it. Set a shorter folder, as /tmp"
            )
        yield folder
    finally:
        remove(folder)


def end_processes(folder: Path) -> None:
    """Kills the processes that write into the folder, as all of Ray's do, and those that they are just starting."""
    deadline = time.monotonic() + REMOVED_WITHIN_S
    while (found := [pid for pid in psutil.pids() if _writes_into(folder, pid)]) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _writes_into(folder: Path, pid: int) -> bool:
    """Whether a process has a file of the folder open; not psutil's `open_files`, which fails where one is just ending."""
    with suppress(OSError):  # it has ended, or is another user's
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(f"{folder}/"):
                    return True
    return False


def remove(folder: Path) -> None:
    """Removes Ray's files; processes that are just ending may still write some."""
    deadline = time.monotonic() + REMOVED_WITHIN_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


@contextmanager
def private_settings(folder: Path) -> Iterator[dict[str, Any]]:
    """For the body, a Ray that starts here is private; yields the options that `ray.init` needs for it.

    Args:
        folder: of its files, from `session_folder`.
    """
    from ray import _raylet
    from ray._private import ray_constants

    core: Any = _raylet

    def read_again() -> None:
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()

    network = {name: os.environ.get(name, _loopback()) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    own = {"RAY_AUTH_MODE": "token", TOKEN: secrets.token_hex(32), **network}
    try:
        # Where Ray makes no clusters of several nodes, a node's address is the loopback; `_node_ip_address` cannot say so.
        with _environment(own), replaced(ray_constants, "ENABLE_RAY_CLUSTER", False):
            read_again()
            # Ray opens the folder that it is given to everyone, so it gets one within ours.
            yield {"_temp_dir": str(folder / "r")}
    finally:
        read_again()


def _loopback() -> str:
    """The name of the network interface that reaches this machine alone."""
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in interfaces if LOOPBACK in [address.address for address in addresses]),
        "lo",
    )


@contextmanager
def _environment(own: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in own}
    os.environ |= own
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """For the body, an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
