"""What the contract suite needs of a transport: one `Kind` each, registered by a file `ends_<transport>.py` beside this one.

    @kind("shared_memory", one_sided=True)
    @asynccontextmanager
    async def open_shared_memory(two: TwoPools) -> AsyncIterator[Opened]:
        source = SharedMemorySource(two.pool, ...)
        try:
            yield Opened(source, lambda: SharedMemoryReader(two.executor, ...))
        finally:
            source.close()

The files are found by their names; nothing else has to be changed.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from engine.async_engine import AsyncEngine
from kvtransfer.hold import Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.memories import BlockMemory, Blocks
from kvtransfer.transport import KvReader, KvSource


class Gate:
    """Holds copies open: the first `num_free` pass, the next ones wait until it is opened."""

    def __init__(self) -> None:
        self.num_free = 1_000_000
        self.reached = asyncio.Event()
        self.in_the_middle: Callable[[], None] = lambda: None
        """What a test does while a run is being copied: called by `middle`."""
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self._open_on_loop = asyncio.Event()

    @property
    def opened(self) -> bool:
        """Everything passes."""
        return self._open.is_set()

    def open(self) -> None:
        """Lets everything pass."""
        self._open.set()
        self._open_on_loop.set()

    def pass_in_thread(self) -> None:
        """Waits in a copy thread."""
        if self._counts():
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._open.wait(20)

    async def pass_on_loop(self) -> None:
        """Waits on the event loop, and can be cancelled there."""
        if self._counts():
            self.reached.set()
            await self._open_on_loop.wait()

    def middle(self) -> None:
        """A one-sided kind calls this once in each copy, behind its first look at the generations and before its last one, in any thread."""
        self.in_the_middle()

    def _counts(self) -> bool:
        self.num_free -= 1
        return self.num_free < 0 and not self._open.is_set()


class GatedThread(Executor):
    """One thread whose every piece of work goes through the gate first."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._threads = ThreadPoolExecutor(1)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """As an executor's."""

        def gated() -> Any:
            self._gate.pass_in_thread()
            return function(*arguments, **named)

        return self._threads.submit(gated)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As an executor's."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)


@dataclass(frozen=True, slots=True)
class TwoPools:
    """What a kind makes its two ends from."""

    prefill: AsyncEngine
    decode: AsyncEngine
    pool: HostPool
    """Prefill's, with its probe and generations."""
    holds: Holds
    gate: Gate
    executor: GatedThread
    """Decode's copy thread: what runs there waits at the gate first. A kind that copies elsewhere passes the gate on its own."""
    chunk_bytes: int
    mangle: list[Callable[[bytes], list[bytes]]] = field(default_factory=list)
    """Replaces each message on its way, where there are messages."""


async def _nothing() -> None:
    """Letting the blocks go is all that this source's end does."""


@dataclass(slots=True)
class Opened:
    """Both ends of a transport that is open."""

    source: KvSource
    new_reader: Callable[[], KvReader]
    """A reader for one pairing, not yet greeted."""
    dies: Callable[[], Awaitable[None]] = _nothing
    """Prefill's side of the transport ends, as abruptly as it can here. The holds are closed and the blocks released right behind it."""
    memory: BlockMemory | None = None
    """Decode's pool as the reader takes it; None: HostBlocks of the engine's."""
    prefill_blocks: Callable[[], Blocks] | None = None
    """Bytes of prefill's pool, where they are not in the engine's own memory; the kind has to bring them there itself."""
    decode_blocks: Callable[[], Blocks] | None = None
    """The same of decode's."""
    alter_probe: Callable[[], None] | None = None
    """Changes the probe's bytes under the digest that is told of them; None: in the engine's own memory."""


Opener = Callable[[TwoPools], AbstractAsyncContextManager[Opened]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A transport under test."""

    name: str
    open: Opener
    one_sided: bool
    missing: str
    """Why it cannot run here; empty when it can."""


_kinds: dict[str, Kind] = {}


def kind(name: str, *, one_sided: bool, missing: str = "") -> Callable[[Opener], Opener]:
    """Registers an opener. `name` may say more than the transport's own: `nixl_read`, `nixl_write`."""

    def register(opener: Opener) -> Opener:
        _kinds[name] = Kind(name, opener, one_sided, missing)
        return opener

    return register


def kinds() -> Mapping[str, Kind]:
    """All transports that have a file beside this one."""
    for path in sorted(Path(__file__).parent.glob("ends_*.py")):
        importlib.import_module(f"tests.kvtransfer.{path.stem}")
    return _kinds


@asynccontextmanager
async def serving(handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    """A server on 127.0.0.1 with these methods of PrefillService; its target."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tandem.v1.PrefillService", dict(handlers)),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(None)
