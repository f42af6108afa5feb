"""The sources that a prefill process has: each transport is opened once, and one that cannot be opened here is not offered, with the reason kept."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from kvtransfer.cuda_ipc import CudaIpcSource
from kvtransfer.cuda_pool import CudaPool
from kvtransfer.descriptor_sockets import DescriptorSockets
from kvtransfer.errors import HandoverError, NoTransportError
from kvtransfer.hold import Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.inline import InlineSource
from kvtransfer.memory import MemorySource
from kvtransfer.nixl_settings import NixlSettings
from kvtransfer.nixl_source import NixlSource
from kvtransfer.pairing import Pairing
from kvtransfer.shared_memory import SharedMemorySource
from kvtransfer.socket_dir import open_socket_dir
from kvtransfer.transport import KvSource
from tandem.v1 import prefill_pb2

_log = logging.getLogger(__name__)


@runtime_checkable
class KvWriter(Protocol):
    """A source that can write into a staging region of decode's."""

    async def write(self, request: prefill_pb2.WriteKvRequest, pairing: Pairing) -> prefill_pb2.WriteKvResponse:
        """Writes a run of a hold of this pairing, or the probe's bytes, into the slot.

        When it returns or raises, cancelled or not, nothing writes to the slot any more. Raises HandoverError.
        """
        ...


@dataclass(frozen=True, slots=True)
class SourceParts:
    """What sources are made of."""

    pool: HostPool
    holds: Holds
    socket_dir: Path | None = None
    """Where unix sockets are made; None: see open_socket_dir."""
    cuda_pool: CudaPool | None = None
    """The pool, when it is on a GPU."""
    nixl: NixlSettings = field(default_factory=NixlSettings)


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources that are open."""

    by_name: Mapping[str, KvSource]
    missing: Mapping[str, str]
    """Why each other transport is not offered to anybody, by its name."""

    @property
    def inline(self) -> InlineSource | None:
        """The source behind ReadKv."""
        source = self.by_name.get("inline")
        return source if isinstance(source, InlineSource) else None

    @property
    def writer(self) -> tuple[str, KvWriter] | None:
        """The source behind WriteKv, and its name."""
        return next(((name, source) for name, source in self.by_name.items() if isinstance(source, KvWriter)), None)


@asynccontextmanager
async def _memory(parts: SourceParts) -> AsyncIterator[KvSource]:
    source = MemorySource(parts.pool, parts.holds)
    try:
        yield source
    finally:
        source.close()


@asynccontextmanager
async def _shared_memory(parts: SourceParts) -> AsyncIterator[KvSource]:
    sockets = DescriptorSockets(open_socket_dir(parts.socket_dir))
    sockets.start()
    try:
        yield SharedMemorySource(parts.pool, sockets)
    finally:
        await sockets.close()


@asynccontextmanager
async def _cuda_ipc(parts: SourceParts) -> AsyncIterator[KvSource]:
    if parts.cuda_pool is None:
        raise NoTransportError("prefill's pool is in host memory")
    sockets = DescriptorSockets(open_socket_dir(parts.socket_dir))
    sockets.start()
    try:
        yield CudaIpcSource(parts.cuda_pool, sockets)
    finally:
        await sockets.close()


@asynccontextmanager
async def _nixl(parts: SourceParts) -> AsyncIterator[KvSource]:
    if parts.cuda_pool is not None:
        raise NoTransportError("prefill's pool is not in host memory")
    executor = ThreadPoolExecutor(1, thread_name_prefix="nixl-digest")
    try:
        source = NixlSource(parts.pool, parts.holds, executor, parts.nixl)
        try:
            yield source
        finally:
            source.close()
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def _inline(parts: SourceParts) -> AsyncIterator[KvSource]:
    yield InlineSource(parts.pool, parts.holds)


_Open = Callable[[SourceParts], AbstractAsyncContextManager[KvSource]]
"""Opens a source for the time of a `with`. Raises HandoverError, ImportError or OSError when this process cannot have it."""
_OPENERS: dict[str, _Open] = {"memory": _memory, "shared_memory": _shared_memory, "cuda_ipc": _cuda_ipc, "nixl": _nixl, "inline": _inline}


@asynccontextmanager
async def open_sources(parts: SourceParts, names: Sequence[str]) -> AsyncIterator[Sources]:
    """Opens these transports, in this order; closes them in the end, last one first."""
    async with AsyncExitStack() as stack:
        by_name: dict[str, KvSource] = {}
        missing: dict[str, str] = {}
        for name in names:
            if name not in _OPENERS:
                missing[name] = "prefill does not know it"
                continue
            try:
                by_name[name] = await stack.enter_async_context(_OPENERS[name](parts))
            except (HandoverError, ImportError, OSError) as error:
                missing[name] = str(error) or type(error).__name__
            except Exception as error:  # what a library does beyond its promises costs its own transport, not the others
                _log.exception("transport %s cannot be opened", name)
                missing[name] = f"{type(error).__name__}: {error}"
        for name, reason in missing.items():
            _log.info("transport %s is not offered: %s", name, reason)
        _log.info("KV is offered by %s", ", ".join(by_name) or "no transport")
        yield Sources(by_name, missing)
