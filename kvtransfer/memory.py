"""Transport `memory`: decode's engine lives in the same process as prefill's and copies from its pool directly."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from kvtransfer.block_copy import CopyStop, copy_blocks, load_copy
from kvtransfer.copying import run_to_its_end
from kvtransfer.errors import HoldUnknownError, NoTransportError, SourceGoneError
from kvtransfer.hold import Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.memories import Blocks, host_array
from kvtransfer.pairing import PROCESS_ID, Pairing
from kvtransfer.transport import Probe, Rows
from tandem.v1 import kv_pb2, prefill_pb2


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """A pool that readers of this process may copy from, under its holds."""

    pool: HostPool
    holds: Holds


_pools: dict[str, MemoryPool] = {}


class MemorySource:
    """Prefill's side: an entry in the process's table of pools, from its creation until `close`."""

    name = "memory"
    one_sided = False

    def __init__(self, pool: HostPool, holds: Holds) -> None:
        self.pool_id = secrets.token_hex(8)
        _pools[self.pool_id] = MemoryPool(pool, holds)

    async def offer(self, pairing: Pairing) -> kv_pb2.KvSource:
        """See KvSource: only to this process."""
        if pairing.start.process_id != PROCESS_ID:
            raise NoTransportError("decode is another process")
        return kv_pb2.KvSource(memory=kv_pb2.MemorySource(pool_id=self.pool_id))

    def withdraw(self, pairing_id: str) -> None:
        """See KvSource: nothing was made."""

    def close(self) -> None:
        """No new reader finds the pool. Idempotent."""
        _pools.pop(self.pool_id, None)


class MemoryReader:
    """Decode's side: copies in a thread of `executor`."""

    name = "memory"
    max_segment_bytes = 16 << 20

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._pool_id = ""
        self._pairing_id = ""

    def greet(self, start: prefill_pb2.PairStart) -> None:
        """See KvReader: prefill knows this process by its id."""

    async def attach(self, offer: prefill_pb2.PairResponse, source: kv_pb2.KvSource) -> None:
        """See KvReader."""
        self._pool_id, self._pairing_id = source.memory.pool_id, offer.pairing_id
        self._pool()
        await asyncio.get_running_loop().run_in_executor(self._executor, load_copy)

    async def probe(self) -> Probe:
        """See KvReader."""
        source = np.frombuffer(self._pool().pool.probe, np.uint8)
        content, elapsed = np.zeros(len(source), np.uint8), list[float]()

        def move() -> None:
            started = time.perf_counter()
            np.copyto(content, source)
            elapsed.append(time.perf_counter() - started)

        await run_to_its_end(self._executor, lambda _: move(), CopyStop())
        return Probe(content.data, elapsed[0])

    async def read(self, ready: kv_pb2.KvReady, to: Rows) -> None:
        """See KvReader."""
        pool = self._pool()
        try:
            hold = pool.holds.find(ready.hold_id, self._pairing_id)
        except HoldUnknownError as error:
            raise SourceGoneError("the hold is closed") from error
        stop, blocks = CopyStop(), host_array(to.memory)
        with hold.reading(ready.first_block, ready.num_blocks, stop.set) as ids:
            await run_to_its_end(self._executor, lambda _: _copy(pool.pool.memory.array, ids, blocks, to.ids, stop), stop)

    def close(self) -> None:
        """See KvReader."""
        self._pool_id = ""

    def _pool(self) -> MemoryPool:
        pool = _pools.get(self._pool_id)
        if pool is None:
            raise SourceGoneError("the pool is gone from this process")
        return pool


def _copy(source: Blocks, source_ids: Sequence[int], destination: Blocks, destination_ids: Sequence[int], stop: CopyStop) -> None:
    if not copy_blocks(source, source_ids, destination, destination_ids, stop):
        raise SourceGoneError("the copy was stopped")
