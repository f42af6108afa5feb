"""One NIXL agent on a thread of its own.

An agent belongs to one pairing. Its end is what ends every transfer for certain, whatever state the peer is in: NIXL cannot cancel one, and says after an
error only that it has failed. So an agent whose transfer fails or stalls is destroyed first, connections and all, and its callers are told then.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from kvtransfer.errors import HandoverError, HandoverProtocolError, NoTransportError, SourceGoneError, StalledError
from kvtransfer.nixl_pieces import Pieces, Region

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
MAX_DESCRIPTORS = 512
"""Of one post; longer transfers are posted one part after the other."""
MAX_TRANSFER_S = 30.0
"""Longest time of one post."""
MAX_STOP_S = 2.0
"""Time that a transfer whose caller was cancelled has to end by itself."""
_START_S = 20.0
_MAX_PAUSE_S = 0.0002
_GREETING_PAUSE_S = 0.001
_MIN_PAUSE_S = 20e-6
_WORKED_S = 15e-6
"""A poll that took longer has moved something."""
_PREFIX = b"nixlSerDes|"


@dataclass(slots=True)
class _Transfer:
    """One posted handle."""

    handle: Any
    done: Future[None]
    deadline: float
    moved: bool = False
    """All bytes have arrived, only the handle is not released yet."""


@dataclass(slots=True)
class _Calls:
    """What the event loop and the agent's thread share."""

    queue: queue.SimpleQueue[Callable[[], None] | None] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    """Nothing is taken from the queue any more. Under the lock."""


class NixlAgent:
    """An agent from its construction until `close`. Callers live on the event loop; all of NIXL's calls are made on the agent's thread.

    While a transfer runs, or a peer may need this side to make progress (`attending`), it polls every millisecond or more often; else it waits, and polls
    every `tick_s`, if that is given.
    """

    def __init__(
        self,
        nixl: Any,
        regions: Sequence[Region],
        *,
        tick_s: float | None = None,
        max_transfer_s: float = MAX_TRANSFER_S,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """`begin` is called first, on the agent's thread; when it fails there is no agent."""
        self._nixl = nixl
        self._regions = list(regions)
        self._begin = begin
        self._tick_s = tick_s
        self._max_transfer_s = max_transfer_s
        self.opened: Future[bytes] = Future()
        """The agent's metadata: who has it can read and write the regions. Never logged."""
        self.ended: Future[None] = Future()
        """The agent is destroyed: nothing touches the regions any more."""
        self.lost = ""
        """Why the agent can be used no more; empty while it can."""
        self._agent: Any = None
        self._registered: dict[int, Any] = {}
        self._active: list[_Transfer] = []
        self._calls = _Calls()
        self._num_attending = 0
        self._attend_until = 0.0
        self._pause_s = 0.0
        self._close_by: float | None = None
        self._error: HandoverError | None = None
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<NixlAgent {self.lost or 'open'}>"

    # On the event loop.

    async def metadata(self) -> bytes:
        """Waits until the agent is open. Raises NoTransportError."""
        async with asyncio.timeout(_START_S):
            return await asyncio.shield(asyncio.wrap_future(self.opened))

    async def connect(self, metadata: bytes) -> str:
        """Loads a peer's metadata; returns its name. Only for metadata of an authenticated peer: UCX ends the process over some that is malformed.

        Raises HandoverProtocolError, SourceGoneError.
        """
        if not metadata.startswith(_PREFIX):
            raise HandoverProtocolError("this is no metadata of a NIXL agent")
        return await self._call(lambda: self._load(metadata))

    async def register(self, region: Region) -> None:
        """Registers one more region, kept until `deregister` or the end. Raises SourceGoneError."""
        await self._call(lambda: self._register(region))

    async def deregister(self, region: Region) -> None:
        """Ends a registration; no transfer may be using it. Raises SourceGoneError."""
        await self._call(lambda: self._deregister(region))

    async def transfer(self, operation: Literal["READ", "WRITE"], peer: str, own: Pieces, remote: Pieces) -> None:
        """Moves the pieces of both sides, which match one by one, in posts of at most MAX_DESCRIPTORS.

        When it returns or raises, cancelled or not, this side's memory is touched no more. Raises HandoverProtocolError for memory that is not registered,
        SourceGoneError, StalledError.
        """
        for start in range(0, len(own), MAX_DESCRIPTORS):
            part = slice(start, start + MAX_DESCRIPTORS)
            await self._post(operation, peer, own[part], remote[part])

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Within the body the peer may need this side's progress."""
        self._num_attending += 1
        self._calls.queue.put(None)
        try:
            yield
        finally:
            self._num_attending -= 1

    def attend_for(self, seconds: float) -> None:
        """The peer may need this side's progress from now on, for so long."""
        self._attend_until = time.monotonic() + seconds
        self._calls.queue.put(None)

    def close(self, reason: str = "the agent is closed", *, within_s: float = MAX_STOP_S) -> None:
        """Destroys the agent: at once when no transfer runs, at the latest after `within_s`. Idempotent, no await."""
        self.lost = self.lost or reason
        by = time.monotonic() + within_s

        def do() -> None:
            self._close_by = by if self._close_by is None else min(by, self._close_by)

        self._submit(do)

    async def _post(self, operation: str, peer: str, own: Pieces, remote: Pieces) -> None:
        done: Future[None] = Future()
        if not self._submit(lambda: self._start(done, operation, peer, own, remote)):
            raise self._gone()
        waiting = asyncio.wrap_future(done)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await self._outlive(waiting)
            raise

    async def _outlive(self, waiting: asyncio.Future[None]) -> None:
        """Waits through further cancels: for the transfer's end, and from a bound on for the agent's."""
        end_at = time.monotonic() + MAX_STOP_S
        while not waiting.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({waiting}, timeout=max(end_at - time.monotonic(), 0.0) if not self.lost else None)
                if not waiting.done():
                    self.close("a transfer did not end", within_s=0.0)
        if not waiting.cancelled():
            waiting.exception()

    async def _call(self, work: Callable[[], _T]) -> _T:
        result: Future[_T] = Future()

        def do() -> None:
            try:
                if self._agent is None:
                    raise self._gone()
                result.set_result(work())
            except Exception as error:  # NIXL's errors have no common base
                result.set_exception(_handover_error(error))

        if not self._submit(do):
            raise self._gone()
        return await asyncio.shield(asyncio.wrap_future(result))

    def _submit(self, call: Callable[[], None]) -> bool:
        with self._calls.lock:
            if self._calls.closed:
                return False
            self._calls.queue.put(call)
            return True

    def _gone(self) -> SourceGoneError:
        return SourceGoneError(self.lost or "the agent is closed")

    # On the agent's thread.

    def _run(self) -> None:
        try:
            self.opened.set_result(self._open())
        except Exception as error:  # NIXL's errors have no common base
            self._error = NoTransportError(f"NIXL has no agent: {error}")
            self.opened.set_exception(self._error)
        try:
            while self._error is None and not self._due():
                self._take()
                self._poll()
        except Exception as error:
            _log.exception("a NIXL agent failed")
            self._error = SourceGoneError(f"the NIXL agent failed: {error}")
        finally:
            self._end()

    def _open(self) -> bytes:
        self._begin()
        config = self._nixl.nixl_agent_config(enable_prog_thread=False, num_threads=0, backends=["UCX"])
        self._agent = self._nixl.nixl_agent(secrets.token_hex(16), config)
        for region in self._regions:
            self._register(region)
        return bytes(self._agent.get_agent_metadata())

    def _due(self) -> bool:
        return self._close_by is not None and (not self._active or time.monotonic() >= self._close_by)

    def _take(self) -> None:
        """Makes the calls that are waiting; waits for one as long as nothing has to be polled."""
        busy = bool(self._active) or self._num_attending > 0 or time.monotonic() < self._attend_until
        try:
            call = self._calls.queue.get(timeout=self._pause_s if busy else self._tick_s) if self._pause_s or not busy else self._calls.queue.get_nowait()
            while True:
                self._pause_s = 0.0
                if call is not None:
                    call()
                call = self._calls.queue.get_nowait()
        except queue.Empty:
            pass

    def _poll(self) -> None:
        started = time.perf_counter()
        for transfer in list(self._active):
            self._check(transfer)
        self._agent.get_new_notifs()  # progress for the peer; nobody sends any
        worked = time.perf_counter() - started > _WORKED_S
        longest = _MAX_PAUSE_S if self._active or self._num_attending else _GREETING_PAUSE_S
        self._pause_s = 0.0 if worked else min(max(2 * self._pause_s, _MIN_PAUSE_S), longest)

    def _register(self, region: Region) -> None:
        self._registered[region.address] = (self._agent.register_memory([(region.address, region.num_bytes, 0, "")], "DRAM"), region)

    def _deregister(self, region: Region) -> None:
        self._agent.deregister_memory(self._registered.pop(region.address)[0])

    def _load(self, metadata: bytes) -> str:
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def _start(self, done: Future[None], operation: str, peer: str, own: Pieces, remote: Pieces) -> None:
        if self.lost:
            done.set_exception(self._gone())
            return
        try:
            handle = self._agent.initialize_xfer(operation, self._descriptors(own), self._descriptors(remote), peer)
        except Exception as error:  # NIXL's errors have no common base
            done.set_exception(_handover_error(error))
            return
        self._active.append(_Transfer(handle, done, time.monotonic() + self._max_transfer_s))
        try:
            self._agent.transfer(handle)
        except Exception as error:
            self._fail(_handover_error(error))

    def _descriptors(self, pieces: Pieces) -> Any:
        return self._agent.get_xfer_descs(np.column_stack((pieces, np.zeros(len(pieces), np.uint64))), "DRAM")

    def _check(self, transfer: _Transfer) -> None:
        if not transfer.moved:
            try:
                state = self._agent.check_xfer_state(transfer.handle)
            except Exception as error:  # NIXL's errors have no common base
                self._fail(_handover_error(error))
                return
            if state == "ERR":
                self._fail(SourceGoneError("the transfer failed"))
            elif state == "DONE":
                transfer.moved = True
            elif time.monotonic() > transfer.deadline:
                self._fail(StalledError(f"the transfer took more than {self._max_transfer_s:g} s"))
        if transfer.moved and self._released(transfer):
            self._active.remove(transfer)
            transfer.done.set_result(None)

    def _released(self, transfer: _Transfer) -> bool:
        try:
            self._agent.release_xfer_handle(transfer.handle)
        except Exception as error:  # NIXL's errors have no common base
            if time.monotonic() > transfer.deadline:
                self._fail(_handover_error(error))
            return False  # tried again with the next poll
        return True

    def _fail(self, error: HandoverError) -> None:
        self._error = self._error or error
        self.lost = self.lost or str(error)

    def _end(self) -> None:
        """Destroys the agent, then tells everybody who waits."""
        error = self._error or self._gone()
        self.lost = self.lost or str(error)
        for transfer in self._active:
            with suppress(Exception):  # the agent's end ends it all the same
                self._agent.release_xfer_handle(transfer.handle)
            transfer.handle = None
        for registration, _ in self._registered.values():
            with suppress(Exception):
                self._agent.deregister_memory(registration)
        self._registered.clear()
        self._agent = None
        self._regions.clear()
        with self._calls.lock:
            self._calls.closed = True
        self.ended.set_result(None)
        self._refuse_calls()
        for transfer in self._active:
            transfer.done.set_exception(error)
        self._active.clear()

    def _refuse_calls(self) -> None:
        """What is still in the queue finds no agent, and is told so."""
        with suppress(queue.Empty):
            while True:
                call = self._calls.queue.get_nowait()
                if call is not None:
                    call()


def _handover_error(error: Exception) -> HandoverError:
    """NIXL's exception as one of ours; its type says more than its text."""
    name = type(error).__name__
    if isinstance(error, HandoverError):
        return error
    if name in ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError"):
        return HandoverProtocolError(f"NIXL refused the memory or the peer: {name}")
    return SourceGoneError(f"the transfer failed: {name}")
