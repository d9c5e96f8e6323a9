"""Messages over a stream socket: a nonce, the length of the body, the body.

An answer carries the nonce of its request, so unrequested bytes are never mistaken for an answer.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Container

NONCE_BYTES = 16
LARGEST_BODY = 2**31 - 1
HEADER = struct.Struct(f"!{NONCE_BYTES}sI")


class ProtocolError(Exception):
    """Something other than the expected answer arrived."""


def new_nonce() -> bytes:
    """A random nonce that cannot be guessed."""
    return os.urandom(NONCE_BYTES)


def send(channel: socket.socket, nonce: bytes, body: bytes, timeout_s: float | None = None) -> None:
    """Sends one message; ConnectionError or TimeoutError if the other side does not receive it."""
    channel.settimeout(timeout_s)
    channel.sendall(frame(nonce, body))


def frame(nonce: bytes, body: bytes) -> bytes:
    """A message as bytes to send."""
    return HEADER.pack(nonce, len(body)) + body


def receive(
    channel: socket.socket,
    expected: Container[bytes] | None = None,
    *,
    limit: int = LARGEST_BODY,
    timeout_s: float | None = None,
) -> tuple[bytes, bytes]:
    """The nonce and the body of the next message.

    Args:
        expected: the nonces to accept. limit: the largest body in bytes. timeout_s: for the whole message, however slowly
            its bytes arrive.

    Raises:
        ProtocolError: the nonce is not in `expected`, or the body is longer than `limit`.
        TimeoutError: the message was not complete in time.
        EOFError: the other side has closed.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    nonce, size = HEADER.unpack(_read(channel, HEADER.size, deadline))
    if expected is not None and nonce not in expected:
        raise ProtocolError("unrequested bytes")
    if size > limit:
        raise ProtocolError(f"an answer of {size} bytes; the limit is {limit}")
    return nonce, _read(channel, size, deadline)


def _read(channel: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        channel.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
        try:
            part = channel.recv(min(count - len(data), 2**20))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError
        data += part
    return bytes(data)
