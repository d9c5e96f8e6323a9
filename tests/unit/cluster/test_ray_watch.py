"""Ray's head and raylet as two sockets that close."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.workers.cluster import ray_watch
from tandem.workers.cluster.ray_watch import RAYLET_LOST, RayWatch


@dataclass
class Cluster:
    """Sockets that stand for Ray's head and raylet, and a `RayWatch` on both."""

    head: socket.socket
    raylet: socket.socket  # the test's end of the watch's connection
    watch: RayWatch
    told: queue.Queue[str]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(ray_watch, "HEAD_LOOKED_AT_S", 0.05)
    told: queue.Queue[str] = queue.Queue()
    path = str(tmp_path / "raylet")
    with socket.create_server(("127.0.0.1", 0)) as head, socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        watch = RayWatch(f"127.0.0.1:{head.getsockname()[1]}", path, told.put)
        raylet, _ = server.accept()
        yield Cluster(head, raylet, watch, told)
        raylet.close()


def test_a_raylet_that_ends_is_told_at_once(cluster: Cluster) -> None:
    cluster.raylet.close()
    assert cluster.told.get(timeout=2) == RAYLET_LOST
    cluster.watch.let_raylet_end()
    cluster.watch.end()


def test_a_raylet_may_end_when_it_is_told_to_but_the_head_is_watched_on(cluster: Cluster) -> None:
    cluster.watch.let_raylet_end()
    cluster.raylet.close()
    with pytest.raises(queue.Empty):
        cluster.told.get(timeout=0.3)
    cluster.head.close()
    assert "Ray's head is gone: nothing answers at 127.0.0.1:" in cluster.told.get(timeout=2)
    cluster.watch.end()
    assert cluster.told.empty()


def test_nothing_is_told_of_a_cluster_that_lives(cluster: Cluster) -> None:
    with pytest.raises(queue.Empty):
        cluster.told.get(timeout=0.3)
    cluster.watch.end()
    cluster.raylet.close()
    cluster.head.close()
    with pytest.raises(queue.Empty):
        cluster.told.get(timeout=0.3)


def test_who_ends_the_cluster_waits_for_what_is_being_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending the cluster waits while a loss is being reported, because the report must not be cut off."""
    may_return = threading.Event()
    monkeypatch.setattr(cluster.watch, "_on_lost", lambda why: (cluster.told.put(why), may_return.wait(5)))
    cluster.raylet.close()
    cluster.told.get(timeout=2)
    ending = threading.Thread(target=cluster.watch.let_raylet_end)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    may_return.set()
    ending.join(5)
    assert not ending.is_alive()
    cluster.watch.end()
