"""Handing descriptors and secrets to a paired decode instance over a unix socket, once each end has proved that it knows the pairing's key.

Packets: decode's greeting (version, purpose, pairing, its proof), prefill's proof, decode's consent, prefill's grant (payload and descriptors). The proofs name
the purpose, so that one cannot be used for another. Who fails anything gets no answer, and its connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvtransfer.errors import HandoverProtocolError, NoTransportError
from kvtransfer.packet_socket import ClosedError, connect, packet_socket, peer_uid, receive, receive_fds, send
from kvtransfer.pairing import proof

_log = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 4096
MAX_DESCRIPTORS = 4
_GREETING = struct.Struct("8s16s32s32s")
_VERSION = b"tandem\0\1"
_MAX_PURPOSE_BYTES = 16
_PROOF_BYTES = 32
_CONSENT = b"\1"
_NAME = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = ".new"
_UNFINISHED_FOR_S = 60.0
_ACCEPT_RETRY_S = 1.0


@dataclass(slots=True)
class _Published:
    key: bytes = field(repr=False)
    payload: bytes = field(repr=False)
    fds: list[int]
    fetched: bool = False

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """What one end of a connection may take, and whom it believes to be who."""

    max_connections: int = 32
    """Served at once; more of them wait in the kernel's queue."""
    timeout_s: float = 3.0
    """Seconds for a connection from first to last."""
    uid_of: Callable[[socket.socket], int] = peer_uid


class DescriptorSockets:
    """Prefill's side: one listening socket of a random name in a directory that only this user can enter. Lives on the event loop."""

    def __init__(self, directory: Path, limits: SocketLimits | None = None) -> None:
        self.name = secrets.token_hex(16)
        """The socket's file name: all that a peer is told."""
        self._directory = directory
        self._limits = limits or SocketLimits()
        self._published: dict[tuple[str, str], _Published] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._accepting = False

    def start(self) -> None:
        """Listens, after it has removed sockets on which nobody listens any more. Raises OSError."""
        remove_leftovers(self._directory)
        listener, unfinished = packet_socket(), self._directory / (self.name + _UNFINISHED)
        try:
            listener.bind(str(unfinished))
            listener.listen(self._limits.max_connections)
            # Under its name only now: whoever looks for leftovers would take a socket on which nobody listens yet for one.
            unfinished.rename(self._directory / self.name)
        except BaseException:
            listener.close()
            unfinished.unlink(missing_ok=True)
            raise
        self._listener = listener
        self._accept_more()

    async def close(self) -> None:
        """Ends every connection, forgets what is published, removes the file. Idempotent."""
        if self._listener is not None:
            self._accept_no_more()
            self._listener.close()
            self._listener = None
            (self._directory / self.name).unlink(missing_ok=True)
        for pairing_id, purpose in list(self._published):
            self.withdraw(pairing_id, purpose)
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(set(self._connections))

    def publish(self, pairing_id: str, key: bytes, purpose: str, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Lets who proves `key` fetch payload and descriptors, once; `purpose` is the transport's name.

        The payload has 1 to MAX_PAYLOAD_BYTES bytes. The descriptors are duplicated: the caller keeps its own. Raises NoTransportError when they cannot be.
        """
        fits = 0 < len(payload) <= MAX_PAYLOAD_BYTES and len(fds) <= MAX_DESCRIPTORS and len(purpose.encode()) <= _MAX_PURPOSE_BYTES
        if not fits or (pairing_id, purpose) in self._published:
            raise ValueError(f"{purpose}: cannot publish {len(payload)} bytes and {len(fds)} descriptors, or not twice for a pairing")
        published = _Published(key, payload, [])
        try:
            published.fds.extend(os.dup(fd) for fd in fds)
        except OSError as error:
            published.close()
            raise NoTransportError(f"a descriptor cannot be given away: {error.strerror}") from error
        self._published[pairing_id, purpose] = published

    def withdraw(self, pairing_id: str, purpose: str) -> None:
        """Nobody can fetch it any more. Idempotent, no await."""
        published = self._published.pop((pairing_id, purpose), None)
        if published is not None:
            published.close()

    def _accept_more(self) -> None:
        if self._listener is not None and not self._accepting and len(self._connections) < self._limits.max_connections:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
            self._accepting = True

    def _accept_no_more(self) -> None:
        if self._listener is not None and self._accepting:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._accepting = False

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # Out of descriptors, most likely: the loop would call again at once, and for ever.
            _log.error("cannot accept a connection for descriptors: %s", error)
            self._accept_no_more()
            asyncio.get_running_loop().call_later(_ACCEPT_RETRY_S, self._accept_more)
            return
        connection.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(self._ended)
        if len(self._connections) >= self._limits.max_connections:
            self._accept_no_more()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._accept_more()

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    await self._grant(connection)
            except TimeoutError:
                _log.warning("a connection for descriptors did not get on within %g s", self._limits.timeout_s)
            except ClosedError:
                _log.debug("a connection for descriptors was closed by the other end")
            except (OSError, HandoverProtocolError) as error:
                _log.warning("a connection for descriptors was refused: %s", error)

    async def _grant(self, connection: socket.socket) -> None:
        _require_own_uid(self._limits.uid_of(connection))
        published, purpose = self._find(await receive(connection, _GREETING.size))
        try:
            await send(connection, proof(published.key, f"prefill {purpose}"))
            if await receive(connection, len(_CONSENT)) != _CONSENT:
                raise HandoverProtocolError("decode does not consent")
            if any(published is one for one in self._published.values()):
                await send(connection, published.payload, published.fds)
        finally:
            published.close()

    def _find(self, greeting: bytes) -> tuple[_Published, str]:
        """What was published for who greets so; from now on nobody else can fetch it."""
        version, padded, pairing_id, its_proof = _GREETING.unpack(greeting)
        if version != _VERSION:
            raise HandoverProtocolError("another version")
        purpose = padded.rstrip(b"\0").decode("ascii", "replace")
        published = self._published.get((pairing_id.decode("ascii", "replace"), purpose))
        if published is None or not hmac.compare_digest(its_proof, proof(published.key, f"decode {purpose}")):
            raise HandoverProtocolError("the pairing is not known, or its key is not")
        if published.fetched:
            raise HandoverProtocolError(f"{purpose} was fetched before")
        published.fetched = True
        return published, purpose


def remove_leftovers(directory: Path) -> None:
    """Removes sockets of processes that died. Raises OSError."""
    for path in directory.iterdir():
        unfinished = path.suffix == _UNFINISHED
        if not _NAME.fullmatch(path.stem if unfinished else path.name) or not path.is_socket():
            continue
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _UNFINISHED_FOR_S if unfinished else not _listens(path):
                path.unlink()


def _listens(path: Path) -> bool:
    with packet_socket() as connection:
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True


@dataclass(frozen=True, slots=True)
class Fetched:
    """What prefill published for a pairing. `fetch` closes the descriptors at its end: who needs one for longer maps or duplicates it."""

    payload: bytes = field(repr=False)
    fds: tuple[int, ...]


@asynccontextmanager
async def fetch(
    path: Path, pairing_id: str, key: bytes, purpose: str, *, num_fds: int = 1, timeout_s: float = 10.0, uid_of: Callable[[socket.socket], int] = peer_uid
) -> AsyncIterator[Fetched]:
    """Decode's side: fetches what prefill published; `path` is that of socket_path. The descriptors are open within the `async with`.

    Raises NoTransportError with the reason.
    """
    greeting = _GREETING.pack(_VERSION, purpose.encode(), pairing_id.encode(), proof(key, f"decode {purpose}"))
    fds: list[int] = []
    try:
        with packet_socket() as connection:
            try:
                async with asyncio.timeout(timeout_s):
                    await connect(connection, str(path))
                    _require_own_uid(uid_of(connection))
                    await send(connection, greeting)
                    if not hmac.compare_digest(await receive(connection, _PROOF_BYTES), proof(key, f"prefill {purpose}")):
                        raise HandoverProtocolError("who listens does not know the pairing's key")
                    await send(connection, _CONSENT)
                    payload = await receive_fds(connection, MAX_PAYLOAD_BYTES, MAX_DESCRIPTORS, fds)
            except TimeoutError:
                raise NoTransportError(f"prefill's socket gave nothing within {timeout_s:g} s") from None
            except FileNotFoundError:
                raise NoTransportError(f"prefill's socket is not in {path.parent}: both need the same directory") from None
            except (OSError, HandoverProtocolError) as error:
                raise NoTransportError(f"prefill's socket: {error}") from error
        if len(fds) != num_fds:
            raise NoTransportError(f"prefill's socket gave {len(fds)} descriptors, {num_fds} were to come")
        yield Fetched(payload, tuple(fds))
    finally:
        for fd in fds:
            os.close(fd)


def socket_path(directory: Path, name: str) -> Path:
    """Where a socket that a peer named is in decode's own directory. Raises HandoverProtocolError for anything but a name as DescriptorSockets makes them."""
    if not _NAME.fullmatch(name):
        raise HandoverProtocolError("the name of a socket must be 32 hexadecimal digits")
    return directory / name


def _require_own_uid(uid: int) -> None:
    if uid != os.geteuid():
        raise HandoverProtocolError(f"the other end belongs to user {uid}")
