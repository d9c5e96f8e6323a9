"""The Ray cluster of a run: a private one that it starts and ends, or one that it joins and leaves as it was."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tandem.platform.config.schema import ClusterConfig, ConfigError
from tandem.workers.cluster.private_cluster import private_settings, replaced, session_folder
from tandem.workers.cluster.ray_watch import CONNECT_TIMEOUT_S, RayWatch, own_raylet


@contextmanager
def connected(
    config: ClusterConfig,
    dashboard: bool = False,
    on_lost: Callable[[str], None] | None = None,
    folder: Path | None = None,
) -> Iterator[None]:
    """Connects to Ray for the body.

    A joined cluster is never stopped. Names of actors live in a namespace of this run, so runs can share a cluster.

    Args:
        on_lost: is told, from a thread, why the cluster is of no more use; see `RayWatch`.
        folder: of a private cluster's files; without one, it makes its own.

    Raises:
        ConfigError: no Ray answers at cluster.address, or it wants a token. WorkerFailed: a private one does not start.
    """
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    namespace = f"tandem-{uuid.uuid4().hex[:12]}"
    common: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
    with ExitStack() as stack:
        with _own_signals():
            if config.address is None:
                options = stack.enter_context(private_settings(folder or stack.enter_context(session_folder())))
                _start(config, include_dashboard=dashboard, **options, **common)
            else:
                _join(config.address, **common)
        watch = None
        if on_lost is not None:
            watch = RayWatch(ray.get_runtime_context().gcs_address, own_raylet(), on_lost)
        try:
            yield
        finally:
            if watch is not None:
                watch.let_raylet_end()
            ray.shutdown()  # waits for a head that is gone, so that is watched until here
            if watch is not None:
                watch.end()


@contextmanager
def _own_signals() -> Iterator[None]:
    """For the body, in which Ray starts, it leaves the handlers of signals as they are, and afterwards when it ends.

    One of SIGTERM's it would set in Python. Another it would set in C++, where it ends the process at once, and take away
    when it shuts down, with whatever was set since; it does neither where it believes that it is there already.
    """
    import ray

    with replaced(ray._private.utils, "set_sigterm_handler", lambda handler: None):
        try:
            library = ctypes.CDLL(str(ray._raylet.__file__))
            is_set = ctypes.c_bool.in_dll(library, "_ZN3ray6RayLog36is_failure_signal_handler_installed_E")
        except (OSError, ValueError):  # another version of Ray
            yield
            return
        is_set.value = True
        try:
            yield
        finally:
            is_set.value = False


def _start(config: ClusterConfig, **options: Any) -> None:
    import ray

    from tandem.workers.cluster.postmortem import WorkerFailed

    # Ray's head would keep a record of every call, for a dashboard that a private cluster does not have.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # A closed terminal tells all processes that it started; Ray's go on, so that the run can save what it has done.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        # Without "local" Ray would join whatever cluster an address file or RAY_ADDRESS names.
        ray.init(address="local", num_cpus=config.num_cpus or usable_cpus(), **options)
    except Exception as error:  # Ray has no class for it
        raise WorkerFailed(
            f"a private Ray did not start: {error}. Ray's node process (raylet) or its head may have been killed, most "
            "often by the kernel for lack of memory (look for 'Killed process' in dmesg). `python launch/doctor.py` "
            "tries it alone"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _join(address: str, **options: Any) -> None:
    import ray

    check_answers(address)
    # Workers of a joined cluster do not inherit this process's environment.
    variables = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
    try:
        ray.init(address=address, runtime_env={"env_vars": variables}, **options)
    except ConnectionError as error:
        raise ConfigError(_refusal(address, error)) from error


def _refusal(address: str, error: ConnectionError) -> str:
    if "AuthToken" in f"{error} {error.__cause__} {error.__context__}":
        return (
            f"cluster.address={address}: Ray there asks for a token, as it does by default where `ray start` found one. "
            "Set RAY_AUTH_MODE=token in the environment, with the cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    return f"cluster.address={address}: something answers there, but {error}. Is it Ray's head, of the same version?"


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
