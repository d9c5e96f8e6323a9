"""The Ray cluster of a run: a private cluster that the run starts and ends, or an existing cluster that it joins."""

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
    """Connects to Ray while the body runs.

    A joined cluster is never stopped. Each run has its own namespace for actor names, so runs can share a cluster.

    Args:
        on_lost: called from a thread, with the reason, when the cluster is lost; see `RayWatch`.
        folder: for a private cluster's files; by default a new temporary folder.

    Raises:
        ConfigError: no Ray answers at cluster.address, or Ray asks for a token. WorkerFailed: a private Ray does not start.
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
            ray.shutdown()  # would wait for a lost head, so the watch on the head continues until here
            if watch is not None:
                watch.end()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps Ray from changing signal handlers, both when it starts in the body and when it shuts down later.

    Ray would set a SIGTERM handler in Python. It would also install a C++ handler that ends the process at once, and on
    shutdown remove that handler along with any installed since. Ray does neither if its flag says the C++ handler exists.
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

    # Otherwise Ray's head would record every call for a dashboard that a private cluster does not have.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # A closing terminal sends SIGHUP to all its processes. Ray's processes ignore it, so the run can save its progress.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        # Without "local" Ray would join whatever cluster an address file or RAY_ADDRESS names.
        ray.init(address="local", num_cpus=config.num_cpus or usable_cpus(), **options)
    except Exception as error:  # Ray has no specific exception class for this
        raise WorkerFailed(
            f"a private Ray did not start: {error}. Ray's node process (raylet) or its head may have been killed, most "
            "often by the kernel for lack of memory (look for 'Killed process' in dmesg). `python launch/doctor.py` "
            "tests Ray by itself"
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
            f"cluster.address={address}: Ray there asks for a token, the default if `ray start` found one. "
            "Set RAY_AUTH_MODE=token in the environment, with the cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    return f"cluster.address={address}: something answers there, but {error}. Is it Ray's head, of the same version?"


def usable_cpus() -> int:
    """The number of CPUs this process may use: its affinity, limited by its cgroup's quota."""
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
    """Checks that Ray answers at an address.

    Raises:
        ConfigError: the address is malformed, or Ray does not listen there. Takes seconds; the message says what to do.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"cluster.address={address}: expected host:port, for example 10.0.0.1:6379")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name, such as "10.0..1"
        raise ConfigError(
            f"cluster.address={address}: nothing answers there ({error}). Start Ray on that host with "
            f"`ray start --head --port={port}`, correct the address, or leave it out for a private cluster"
        ) from error
    if os.environ.get("RAY_USE_TLS", "0") == "0" and not _speaks_grpc(address):
        raise ConfigError(
            f"cluster.address={address}: something listens there, but it is not Ray's head. The head's port is the one "
            "given to `ray start --head --port=...`, 6379 by default; it is not the dashboard's port"
        )


def _speaks_grpc(address: str) -> bool:
    """Whether the server at an address speaks gRPC, as Ray's head does. Ray itself would retry for minutes."""
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            return False
    return True
