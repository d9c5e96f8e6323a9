"""Watches the two Ray processes that a run cannot continue without: the cluster's head, and this node's raylet.

When they are lost, Ray ends the driver without a message: a minute after losing the head, or, after losing the raylet, in
the next call that uses shared memory.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Any

CONNECT_TIMEOUT_S = 5.0
HEAD_LOOKED_AT_S = 5.0  # seconds between checks of Ray's head
HEAD_LOST_AFTER = 3  # failed checks in a row
RAYLET_LOST = (
    "Ray's node process (raylet) on this machine is gone. The likely cause is that it was killed, most often by the kernel "
    "for lack of memory (look for 'Killed process' in dmesg), or it crashed. Start the run again to resume"
)


class RayWatch:
    """Calls `on_lost(why)` once, from a thread, when the raylet ends or the head stays unreachable.

    Args:
        head: host:port of the head. raylet: path of the raylet's unix socket.
    """

    def __init__(self, head: str, raylet: str, on_lost: Callable[[str], None]) -> None:
        self._head, self._on_lost = head, on_lost
        self._raylet = connection_to(raylet)
        self._orders, self._ordered = socket.socketpair()
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="Ray watch", daemon=True)
        self._thread.start()

    def let_raylet_end(self) -> None:
        """Stops watching the raylet; if `on_lost` is running, waits for it to return."""
        with self._telling:
            self._orders.send(b"r")

    def end(self) -> None:
        """Ends the watch; if `on_lost` is running, waits for it to return."""
        self._orders.close()
        self._thread.join()
        for connection in (self._raylet, self._ordered):
            connection.close()

    def _watch(self) -> None:
        failures, poll = 0, select.poll()
        poll.register(self._raylet, select.POLLIN)
        poll.register(self._ordered, select.POLLIN)  # after the raylet: shows an order sent before its end
        while failures < HEAD_LOST_AFTER:
            ready = {descriptor for descriptor, _ in poll.poll(1000 * HEAD_LOOKED_AT_S)}
            if self._ordered.fileno() in ready:
                if not self._ordered.recv(1):
                    return
                poll.unregister(self._raylet)
            elif ready:  # the raylet never sends anything, so it has closed its end of the connection
                self._tell(RAYLET_LOST)
                return
            else:
                why = self._look_at_head()
                failures = failures + 1 if why else 0
        self._tell(f"Ray's head is gone: {why}. Its process or its node has ended; start the cluster again")

    def _tell(self, why: str) -> None:
        with self._telling:
            self._on_lost(why)

    def _look_at_head(self) -> str | None:
        """The reason why the head cannot be reached; None if it can."""
        host, _, port = self._head.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return f"nothing answers at {self._head} ({error})"
        return None


def own_raylet() -> str:
    """The unix socket of the raylet that this process is connected to."""
    import ray

    node: Any = ray._private.worker._global_node
    return str(node.raylet_socket_name)


def connection_to(raylet: str) -> socket.socket:
    """A silent connection that becomes readable when the raylet ends.

    Args:
        raylet: path of the raylet's unix socket.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(raylet)
    return connection
