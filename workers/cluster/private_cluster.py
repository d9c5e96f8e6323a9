"""Keeps a private Ray private: it listens only on the loopback, requires a token, and other users cannot read its files.

Only processes of the same user can read a process's environment. The token is therefore an environment variable: it is in
no file and on no command line, and disappears with the processes that hold it.
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
_SOCKET = "r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # an example of Ray's longest socket path
REMOVED_WITHIN_S = 5.0


@contextmanager
def session_folder() -> Iterator[Path]:
    """Creates a folder for Ray's files that no other user can enter; removes it after the body.

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
                f"RAY_TMPDIR={above} is {excess} bytes too long for Ray's sockets. Set a shorter folder, such as /tmp"
            )
        yield folder
    finally:
        remove(folder)


def end_processes(folder: Path) -> None:
    """Kills the processes that write into the folder, as all Ray processes do; repeats to catch those still starting."""
    deadline = time.monotonic() + REMOVED_WITHIN_S
    while (writers := [pid for pid in psutil.pids() if _writes_into(folder, pid)]) and time.monotonic() < deadline:
        for pid in writers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _writes_into(folder: Path, pid: int) -> bool:
    """Whether a process has a file of the folder open. (psutil's `open_files` fails for processes that are ending.)"""
    with suppress(OSError):  # the process has ended, or belongs to another user
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith(f"{folder}/"):
                    return True
    return False


def remove(folder: Path) -> None:
    """Removes Ray's files; retries, because processes that are ending may still write some."""
    deadline = time.monotonic() + REMOVED_WITHIN_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


@contextmanager
def private_settings(folder: Path) -> Iterator[dict[str, Any]]:
    """Makes a Ray that starts in the body private; yields the options that `ray.init` needs.

    Args:
        folder: for Ray's files, from `session_folder`.
    """
    from ray import _raylet
    from ray._private import ray_constants

    core: Any = _raylet

    def read_again() -> None:
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()

    network = {name: os.environ.get(name, _loopback()) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    variables = {"RAY_AUTH_MODE": "token", TOKEN: secrets.token_hex(32), **network}
    try:
        # With multi-node clusters disabled, Ray uses the loopback as node address; `_node_ip_address` cannot set that.
        with _environment(variables), replaced(ray_constants, "ENABLE_RAY_CLUSTER", False):
            read_again()
            # Ray makes its folder accessible to everyone, so it gets a subfolder of ours.
            yield {"_temp_dir": str(folder / "r")}
    finally:
        read_again()


def _loopback() -> str:
    """The name of the loopback network interface."""
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in interfaces if LOOPBACK in [address.address for address in addresses]),
        "lo",
    )


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute while the body runs."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
