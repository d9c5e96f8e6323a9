"""The Ray cluster of a run: a private one that it starts and ends, or one that it joins and leaves as it was."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tandem.platform.config import ClusterConfig, ConfigError

CONNECT_TIMEOUT_S = 5.0
HEAD_LOOKED_AT_S = 5.0  # seconds between looks at Ray's head
HEAD_LOST_AFTER = 3  # looks in a row that found nothing


@contextmanager
def connected(
    config: ClusterConfig, dashboard: bool = False, on_head_lost: Callable[[str], None] | None = None
) -> Iterator[float]:
    """Connects to Ray for the body; yields the CPUs of the cluster.

    A joined cluster is never stopped. Names of actors live in a namespace of this run, so runs can share a cluster.

    Raises:
        ConfigError: no Ray answers at cluster.address, or it wants a token.
    """
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    namespace = f"tandem-{uuid.uuid4().hex[:12]}"
    common: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
    if config.address is None:
        cpus = config.num_cpus or usable_cpus()
        # Ray's head would keep a record of every call, for a dashboard that a private cluster does not have.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # Without "local" Ray would join whatever cluster an address file or RAY_ADDRESS names.
        ray.init(address="local", num_cpus=cpus, include_dashboard=dashboard, **common)
    else:
        check_answers(config.address)
        # Workers of a joined cluster do not inherit this process's environment.
        variables = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
        try:
            ray.init(address=config.address, runtime_env={"env_vars": variables}, **common)
        except ConnectionError as error:
            raise ConfigError(_refusal(config.address, error)) from error
    watch = _watch_head(ray.get_runtime_context().gcs_address, on_head_lost) if on_head_lost else None
    try:
        yield float(ray.cluster_resources().get("CPU", 0.0))
    finally:
        ray.shutdown()  # waits for a head that is gone, so it is watched until here
        if watch is not None:
            watch.set()


def _refusal(address: str, error: ConnectionError) -> str:
    if "AuthToken" in f"{error} {error.__cause__} {error.__context__}":
        return (
            f"cluster.address={address}: Ray there asks for a token, as it does by default where `ray start` found one. "
            "Set RAY_AUTH_MODE=token in the environment, with the cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    return f"cluster.address={address}: something answers there, but {error}. Is it Ray's head, of the same version?"


def _watch_head(address: str, on_lost: Callable[[str], None]) -> threading.Event:
    """Looks at Ray's head every few seconds; calls `on_lost(why)`, from a thread, once it has been gone for too long.

    Ray itself would end this process after a minute, without a word to the run. Setting the event that is returned ends it.
    """
    host, _, port = address.rpartition(":")
    stop = threading.Event()

    def watch() -> None:
        failures = 0
        while not stop.wait(HEAD_LOOKED_AT_S):
            try:
                socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
                failures = 0
            except OSError as error:
                failures += 1
                if failures == HEAD_LOST_AFTER:
                    gone = f"nothing answers at {address} ({error})"
                    on_lost(f"Ray's head is gone: {gone}. Its process or its node has ended; start the cluster again")
                    return

    threading.Thread(target=watch, name="head watch", daemon=True).start()
    return stop


def usable_cpus() -> int:
    """CPUs this process may use: its affinity, within its cgroup's quota."""
    count = len(os.sched_getaffinity(0))
    quota = _cgroup_cpus()
    return count if quota is None else max(1, min(count, int(quota)))


def _cgroup_cpus(path: str = "/sys/fs/cgroup/cpu.max") -> float | None:
    try:
        with open(path) as file:
            quota, period = file.read().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def check_answers(address: str) -> None:
    """Refuses an address that is malformed or where nothing listens.

    Raises:
        ConfigError: within seconds, with what to do.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"cluster.address={address}: expected host:port, for example 10.0.0.1:6379")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
            is_grpc = _speaks_grpc(connection)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host that cannot be a name, as "10.0..1"
        raise ConfigError(
            f"cluster.address={address}: nothing answers there ({error}). Start Ray on that host with "
            f"`ray start --head --port={port}`, correct the address, or leave it out for a private cluster"
        ) from error
    if not is_grpc and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise ConfigError(
            f"cluster.address={address}: something listens there, but it is not Ray's head. Its port is the one given to "
            "`ray start --head --port=...`, 6379 by default; not that of the dashboard"
        )


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether the other side greets as HTTP/2 does, which gRPC is spoken over: its first frame says its settings.

    RFC 9113, sections 3.4 and 6.5. Ray itself would try for minutes.
    """
    connection.settimeout(CONNECT_TIMEOUT_S)
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    try:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        answer = b""
        while len(answer) < len(settings) and (more := connection.recv(64)):
            answer += more
    except OSError:
        return False
    return len(answer) >= len(settings) and answer[3] == 4
