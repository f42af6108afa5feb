"""A unix socket whose messages are packets: none can be cut, joined or dripped. On the event loop, whichever that is."""

from __future__ import annotations

import array
import asyncio
import socket
import struct
from collections.abc import Sequence

from kvtransfer.errors import HandoverProtocolError

_CONNECT_RETRY_S = 0.01
_CREDENTIALS = struct.Struct("iII")
_INT_BYTES = array.array("i").itemsize


class ClosedError(HandoverProtocolError):
    """The other end has closed the connection."""


def packet_socket() -> socket.socket:
    """A new one, not connected, that never blocks."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def peer_uid(connection: socket.socket) -> int:
    """User id of the process at the other end as the kernel knows it: who connected, or who listened."""
    return int(_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])


async def connect(connection: socket.socket, path: str) -> None:
    """Waits while the queue of who listens is full. Raises OSError."""
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:  # No event tells when there is room again.
            await asyncio.sleep(_CONNECT_RETRY_S)


async def send(connection: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> None:
    """Sends a packet, which must not be empty, with descriptors. Raises OSError."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    while True:
        try:
            connection.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
            return
        except BlockingIOError:
            await _ready(connection, writing=True)


async def receive(connection: socket.socket, size: int) -> bytes:
    """A packet of exactly this size; the kernel drops descriptors that come with it. Raises HandoverProtocolError, OSError."""
    while True:
        try:
            packet = connection.recv(size + 1)
            break
        except BlockingIOError:
            await _ready(connection)
    if not packet:
        raise ClosedError("the other end has closed the connection")
    if len(packet) != size:
        raise HandoverProtocolError(f"a packet must have {size} bytes here")
    return packet


async def receive_fds(connection: socket.socket, max_bytes: int, max_fds: int, fds: list[int]) -> bytes:
    """A packet with descriptors, which are the caller's as soon as they are in `fds`, also when this raises. Raises HandoverProtocolError, OSError."""
    while True:
        try:
            packet, rights, flags, _ = connection.recvmsg(max_bytes, socket.CMSG_SPACE(max_fds * _INT_BYTES), socket.MSG_CMSG_CLOEXEC)
            break
        except BlockingIOError:
            await _ready(connection)
    for level, kind, content in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received = array.array("i")
            received.frombytes(content[: len(content) - len(content) % _INT_BYTES])
            fds.extend(received)
    if not packet:
        raise ClosedError("the other end has closed the connection")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise HandoverProtocolError(f"a packet may have {max_bytes} bytes and {max_fds} descriptors here")
    return packet


async def _ready(connection: socket.socket, *, writing: bool = False) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(connection, _set, ready)
    try:
        await ready
    finally:
        remove(connection)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
