"""Access of other users to a private cluster: its sockets, its files, and a process that tries to join."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tandem.workers.cluster.private_cluster import TOKEN

JOIN = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False); print('joined')"


def outsider() -> subprocess.Popen[str]:
    """Starts a process without the token that tries for 20 seconds to join this cluster."""
    import ray

    # With this setting, Ray uses 127.0.0.1 as given; otherwise it would try another address of this machine.
    own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    environment = {name: value for name, value in os.environ.items() if name != TOKEN} | own
    command = [sys.executable, "-c", JOIN, ray.get_runtime_context().gcs_address]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def session() -> Path:
    """The folder with the cluster's files."""
    import ray

    node: Any = ray._private.worker._global_node
    return Path(node.get_session_dir_path()).parents[1]


def listening() -> list[tuple[str, str]]:
    """(process, address) of every listening socket of this process and its descendants."""
    sockets = []
    for process in family():
        with suppress(psutil.Error):  # the process has just ended
            for one in process.net_connections(kind="inet"):
                if one.status == psutil.CONN_LISTEN or (one.status == psutil.CONN_NONE and not one.raddr):
                    sockets.append((process.name(), one.laddr.ip))
    return sockets


def family() -> list[psutil.Process]:
    """This process and its descendants."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback


def who_tells(token: str, folder: Path) -> list[str]:
    """The files of the folder and the processes of the cluster that reveal the token."""
    found = [str(path) for path in folder.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]
    for process in family():
        with suppress(psutil.Error):
            if token in " ".join(process.cmdline()):
                found.append(process.name())
    return found
