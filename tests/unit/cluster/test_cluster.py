"""The number of usable CPUs, and addresses at which no Ray answers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.platform.config.schema import ClusterConfig, ConfigError
from tandem.workers.cluster import cluster
from tandem.workers.cluster.cluster import connected, usable_cpus


def closed_port() -> int:
    """A port of this machine at which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def refusal(address: str) -> str:
    with pytest.raises(ConfigError) as caught, connected(ClusterConfig(address=address)):
        pass
    return str(caught.value)


def test_dead_address_fails_in_seconds_and_says_what_to_do() -> None:
    port = closed_port()
    start = time.monotonic()
    text = refusal(f"127.0.0.1:{port}")
    assert time.monotonic() - start < 10
    assert f"cluster.address=127.0.0.1:{port}: nothing answers there" in text
    assert f"ray start --head --port={port}" in text


def test_silent_address_fails_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a host drops packets, connecting fails only when the timeout has passed."""
    asked: list[float] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    assert "nothing answers there (timed out)" in refusal("10.0.0.1:6379")
    assert asked == [cluster.CONNECT_TIMEOUT_S]
    assert cluster.CONNECT_TIMEOUT_S <= 10


@pytest.mark.parametrize(
    "address",
    [
        "",
        "auto",
        "local",
        ":6379",
        "10.0.0.1",
        "10.0.0.1:",
        "10.0.0.1:abc",
        "10.0.0.1:0",
        "10.0.0.1:99999",
        "ray://h:10001",
    ],
)
def test_malformed_address(address: str) -> None:
    assert refusal(address) == f"cluster.address={address}: expected host:port, for example 10.0.0.1:6379"


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400 Bad request\r\n\r\n", b"", None])
def test_what_is_not_rays_head_is_told_in_seconds(monkeypatch: pytest.MonkeyPatch, answer: bytes | None) -> None:
    """Tries a web server, a server that closes the connection, and a server that never answers."""
    monkeypatch.setattr(cluster, "CONNECT_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            with contextlib.suppress(OSError):  # until the server is closed
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    if answer is not None:
                        with contextlib.suppress(OSError), connection:
                            connection.recv(99)
                            connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        start = time.monotonic()
        assert "something listens there, but it is not Ray's head" in refusal(f"127.0.0.1:{server.getsockname()[1]}")
        assert time.monotonic() - start < 3
    assert len(held) >= 2  # the first connection and gRPC's connection


def test_host_that_cannot_be_a_name() -> None:
    assert "cluster.address=10.0..1:6379: nothing answers there" in refusal("10.0..1:6379")


@pytest.mark.parametrize(
    ("why", "said"), [("RPC error: InvalidAuthToken: missing", "RAY_AUTH_MODE=token"), ("no GCS", "Is it Ray's head")]
)
def test_a_head_that_refuses(monkeypatch: pytest.MonkeyPatch, why: str, said: str) -> None:
    def init(**options: Any) -> None:
        try:
            raise RuntimeError(why)
        except RuntimeError as cause:
            raise ConnectionError("Failed to connect to Ray cluster") from cause

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(cluster, "check_answers", lambda address: None)
    with pytest.raises(ConfigError, match=said), connected(ClusterConfig(address="10.0.0.1:6379")):
        pass


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("max 100000\n", None),
        ("200000 100000\n", 2.0),
        ("150000 100000", 1.5),
        ("", None),
        ("nonsense", None),
        ("a b", None),
        ("1 2 3", None),
        ("100 0", None),
    ],
)
def test_cgroup_quota(tmp_path: Path, content: str, expected: float | None) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(content)
    assert cluster._cgroup_cpus(str(path)) == expected


def test_no_cgroup_file(tmp_path: Path) -> None:
    assert cluster._cgroup_cpus(str(tmp_path / "absent")) is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 96), (2.0, 2), (1.5, 1), (0.5, 1), (500.0, 96)])
def test_usable_cpus(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(96)))
    monkeypatch.setattr(cluster, "_cgroup_cpus", lambda: quota)
    assert usable_cpus() == expected
