"""Transport `cuda_ipc`: decode opens prefill's pool on a GPU of the same host and gathers blocks from it with a kernel of its own.

The handle moves over a unix socket that both ends have proved their pairing on, and nowhere else. It is no right to read: who has it can write the whole pool,
and nothing but the process's end takes it back. So prefill and decode are one trust domain here.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor
from pathlib import Path
from weakref import WeakKeyDictionary

from kvtransfer.copying import run_to_its_end
from kvtransfer.cuda_mapping import Mapping, Mappings, PoolExport
from kvtransfer.cuda_pool import CudaBlocks, CudaPool
from kvtransfer.cuda_runtime import CudaError, CudaRuntime
from kvtransfer.descriptor_sockets import DescriptorSockets, fetch, socket_path
from kvtransfer.errors import NoTransportError, SourceGoneError
from kvtransfer.memories import BlockMemory
from kvtransfer.pairing import Pairing, pairing_key, require_same_host
from kvtransfer.transport import Probe, Rows
from tandem.v1 import kv_pb2, prefill_pb2


class CudaIpcSource:
    """Prefill's side: what the socket hands out once to each pairing. Reading is decode's own doing, under prefill's holds."""

    name = "cuda_ipc"
    one_sided = True

    def __init__(self, pool: CudaPool, sockets: DescriptorSockets) -> None:
        self._pool = pool
        self._sockets = sockets

    async def offer(self, pairing: Pairing) -> kv_pb2.KvSource:
        """See KvSource: to a GPU of this host that can read this one's memory."""
        require_same_host(pairing)
        own, its = self._pool.runtime.device_uuid, pairing.start.device_uuid
        if not its:
            raise NoTransportError("decode's pool is in host memory, this one is on a GPU")
        try:
            if its != own and not self._pool.runtime.can_access_peer(its):
                raise NoTransportError(
                    f"decode's GPU {its} has no peer access to {own}, or is not visible here: KV goes through host memory, by the next transport"
                )
            payload = PoolExport.of(self._pool).pack()
        except CudaError as error:
            raise NoTransportError(f"CUDA does not export the pool: {error}") from error
        self._sockets.publish(pairing.pairing_id, pairing.key, self.name, payload, [self._pool.generations.fd])
        return kv_pb2.KvSource(cuda_ipc=kv_pb2.CudaIpcSource(socket_name=self._sockets.name, device_uuid=own))

    def withdraw(self, pairing_id: str) -> None:
        """See KvSource: what has been fetched stays with who fetched it."""
        self._sockets.withdraw(pairing_id, self.name)


class CudaIpcReader:
    """Decode's side: one kernel for each run, on a stream beside the engine's; a thread of `executor` waits for its end."""

    name = "cuda_ipc"
    max_segment_bytes = 64 << 20

    def __init__(self, pool: BlockMemory, mappings: Mappings, executor: Executor, socket_dir: Path) -> None:
        """`pool` is decode's own. Raises NoTransportError for one in host memory."""
        if not isinstance(pool, CudaBlocks):
            raise NoTransportError("decode's pool is in host memory")
        self._pool = pool
        self._mappings = mappings
        self._executor = executor
        self._socket_dir = socket_dir
        self._nonce = b""
        self._lock = threading.Lock()
        """Between `close` and the thread that opens."""
        self._mapping: Mapping | None = None
        self._closed = False
        self._probe_bytes = 0

    def greet(self, start: prefill_pb2.PairStart) -> None:
        """See KvReader."""
        start.device_uuid = self._pool.runtime.device_uuid
        self._nonce = start.nonce

    async def attach(self, offer: prefill_pb2.PairResponse, source: kv_pb2.KvSource) -> None:
        """See KvReader."""
        path = socket_path(self._socket_dir, source.cuda_ipc.socket_name)
        async with fetch(path, offer.pairing_id, pairing_key(self._nonce, offer.nonce), self.name) as fetched:
            export = PoolExport.unpack(fetched.payload)
            if (export.num_blocks, export.probe_bytes) != (offer.num_blocks, offer.probe_bytes):
                raise NoTransportError("the pool that prefill's socket gave is not the one that it told of")
            await run_to_its_end(self._executor, lambda _: self._open(export, fetched.fds[0]), threading.Event())
        self._probe_bytes = offer.probe_bytes

    def _open(self, export: PoolExport, fd: int) -> None:
        mapping = self._mappings.open(export, fd)
        with self._lock:
            if not self._closed:
                self._mapping = mapping
                return
        self._mappings.give_back(mapping)
        raise SourceGoneError("the reader was closed while it attached")

    async def probe(self) -> Probe:
        """See KvReader."""
        mapping, found = self._take(), list[Probe]()
        try:
            await run_to_its_end(self._executor, lambda _: found.append(self._probe(mapping)), threading.Event())
        finally:
            self._mappings.give_back(mapping)
        return found[0]

    def _probe(self, mapping: Mapping) -> Probe:
        runtime = self._pool.runtime
        try:
            landing = runtime.malloc(self._probe_bytes)
            try:
                elapsed_s = mapping.probe(landing)
                return Probe(runtime.copy_to_host(landing, self._probe_bytes), elapsed_s)
            finally:
                runtime.free(landing)
        except CudaError as error:
            raise SourceGoneError(f"the probe failed on the GPU: {error}") from error

    async def read(self, ready: kv_pb2.KvReady, to: Rows) -> None:
        """See KvReader."""
        memory = to.memory
        if not isinstance(memory, CudaBlocks):
            raise TypeError(f"a reader of GPU memory was given {type(memory).__name__}")
        mapping, ids, generations = self._take(), list(ready.block_ids), list(ready.generations)
        try:
            await run_to_its_end(self._executor, lambda stop: mapping.gather(ids, generations, memory, to.ids, stop), threading.Event())
        finally:
            self._mappings.give_back(mapping)

    def _take(self) -> Mapping:
        """The mapping with one user more, who gives it back."""
        with self._lock:
            if self._mapping is None or self._closed:
                raise SourceGoneError("the pool is not attached")
            self._mappings.use(self._mapping)
            return self._mapping

    def close(self) -> None:
        """See KvReader."""
        with self._lock:
            mapping, self._mapping, self._closed = self._mapping, None, True
        if mapping is not None:
            self._mappings.give_back(mapping)


_mappings: WeakKeyDictionary[CudaRuntime, Mappings] = WeakKeyDictionary()


def mappings_of(pool: BlockMemory, executor: Executor) -> Mappings:
    """What all readers of this process on the pool's GPU share; `executor` is kept from the first call. Raises NoTransportError for a pool in host memory."""
    if not isinstance(pool, CudaBlocks):
        raise NoTransportError("decode's pool is in host memory")
    return _mappings.setdefault(pool.runtime, Mappings(pool.runtime, executor))
