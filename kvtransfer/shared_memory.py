"""Transport `shared_memory`: decode maps prefill's pool, in another process of the same host, and copies from it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from enum import Enum
from pathlib import Path

import numpy as np

from kvtransfer.block_copy import CopyBlocks, CopyStop, copy_blocks, load_copy
from kvtransfer.copying import run_to_its_end
from kvtransfer.descriptor_sockets import DescriptorSockets, fetch, socket_path
from kvtransfer.errors import NoTransportError, SourceGoneError, StaleBlockError
from kvtransfer.held_blocks import Generations, Ids, held_blocks
from kvtransfer.host_pool import HostPool
from kvtransfer.mapped_pool import MappedPool, PoolPlan
from kvtransfer.memories import Blocks, host_array
from kvtransfer.pairing import Pairing, pairing_key, require_same_host
from kvtransfer.transport import Probe, Rows
from tandem.v1 import kv_pb2, prefill_pb2


class SharedMemorySource:
    """Prefill's side: gives the pool's descriptor to each paired decode instance, once."""

    name = "shared_memory"
    one_sided = True

    def __init__(self, pool: HostPool, sockets: DescriptorSockets) -> None:
        self._pool = pool
        self._sockets = sockets

    async def offer(self, pairing: Pairing) -> kv_pb2.KvSource:
        """See KvSource: to a pool in host memory on this host."""
        require_same_host(pairing)
        if pairing.start.device_uuid:
            raise NoTransportError("decode's pool is on a GPU")
        cache = self._pool.kv_cache
        self._sockets.publish(pairing.pairing_id, pairing.key, self.name, PoolPlan.of(cache).encode(), [cache.fd])
        return kv_pb2.KvSource(shared_memory=kv_pb2.SharedMemorySource(socket_name=self._sockets.name))

    def withdraw(self, pairing_id: str) -> None:
        """See KvSource."""
        self._sockets.withdraw(pairing_id, self.name)


class _Outcome(Enum):
    COPIED = "copied"
    STALE_BEFORE = "a block was given to another use before it was copied"
    STALE_AFTER = "a block was given to another use while it was copied"
    STOPPED = "the copy was stopped"


class SharedMemoryReader:
    """Decode's side: copies in a thread of `executor`."""

    name = "shared_memory"
    max_segment_bytes = 16 << 20

    def __init__(self, executor: Executor, socket_dir: Path, *, copy: CopyBlocks = copy_blocks) -> None:
        self._executor = executor
        self._socket_dir = socket_dir
        self._copy_blocks = copy
        self._start = prefill_pb2.PairStart()
        self._pool: MappedPool | None = None
        self._closed = False

    def greet(self, start: prefill_pb2.PairStart) -> None:
        """See KvReader: the pairing's own nonce is enough."""
        self._start = start

    async def attach(self, offer: prefill_pb2.PairResponse, source: kv_pb2.KvSource) -> None:
        """See KvReader."""
        path = socket_path(self._socket_dir, source.shared_memory.socket_name)
        key = pairing_key(self._start.nonce, offer.nonce)
        async with fetch(path, offer.pairing_id, key, self.name) as fetched:
            pool = MappedPool(fetched.fds[0], PoolPlan.decode(fetched.payload, offer), self._executor)
        try:
            await pool.populate()
            await asyncio.get_running_loop().run_in_executor(self._executor, load_copy)
            if self._closed:
                raise SourceGoneError("the reader was closed")
        except BaseException:
            pool.close()
            raise
        self._pool = pool

    async def probe(self) -> Probe:
        """See KvReader."""
        pool = self._mapped()
        content, elapsed = np.zeros(pool.plan.probe_bytes, np.uint8), list[float]()

        def move() -> None:
            started = time.perf_counter()
            np.copyto(content, pool.probe)
            elapsed.append(time.perf_counter() - started)

        with pool.reading():
            await run_to_its_end(self._executor, lambda _: move(), CopyStop())
        return Probe(content.data, elapsed[0])

    async def read(self, ready: kv_pb2.KvReady, to: Rows) -> None:
        """See KvReader."""
        pool = self._mapped()
        block_ids, generations = held_blocks(ready.block_ids, ready.generations, num_blocks=pool.plan.num_blocks, num_rows=len(to.ids))
        blocks = host_array(to.memory)
        outcome = [_Outcome.STOPPED]

        stop = CopyStop()

        def copy() -> None:
            outcome[0] = self._copy(pool, block_ids, generations, blocks, to, stop)

        with pool.reading():
            await run_to_its_end(self._executor, lambda _: copy(), stop)
        if outcome[0] is _Outcome.STOPPED:
            raise SourceGoneError(outcome[0].value)
        if outcome[0] is not _Outcome.COPIED:
            raise StaleBlockError(outcome[0].value)

    def close(self) -> None:
        """See KvReader."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _mapped(self) -> MappedPool:
        if self._pool is None:
            raise SourceGoneError("no pool is mapped")
        return self._pool

    def _copy(self, pool: MappedPool, block_ids: Ids, generations: Generations, blocks: Blocks, to: Rows, stop: CopyStop) -> _Outcome:
        # It returns what came of it: an error would keep this frame, and with it views of the mapping.
        if not pool.are_held(block_ids, generations):
            return _Outcome.STALE_BEFORE
        if not self._copy_blocks(pool.blocks, block_ids, blocks, to.ids, stop):
            return _Outcome.STOPPED
        return _Outcome.COPIED if pool.are_held(block_ids, generations) else _Outcome.STALE_AFTER
