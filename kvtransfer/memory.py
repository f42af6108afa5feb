"""Transport `memory`: decode's engine lives in the same process as prefill's and copies from its pool directly."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from kvtransfer.budget import ByteBudget
from kvtransfer.copying import Blocks, copy_blocks, run_to_its_end
from kvtransfer.errors import HoldUnknownError, SourceGoneError
from kvtransfer.hold import Holds
from tandem.v1 import kv_pb2

PROCESS_ID = secrets.token_hex(16)
"""Tells this process from every other one; new with every start."""


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """A pool that readers of this process may copy from, under its holds."""

    blocks: Blocks
    holds: Holds


_pools: dict[str, MemoryPool] = {}


class MemorySource:
    """Prefill's side: an entry in the process's table of pools, from its creation until `close`."""

    def __init__(self, blocks: Blocks, holds: Holds) -> None:
        self.pool_id = secrets.token_hex(8)
        _pools[self.pool_id] = MemoryPool(blocks, holds)

    def reachable(self, process_id: str) -> bool:
        """Only this process."""
        return process_id == PROCESS_ID

    def describe(self) -> kv_pb2.KvSource:
        """The pool's key."""
        return kv_pb2.KvSource(memory=kv_pb2.MemorySource(pool_id=self.pool_id))

    def close(self) -> None:
        """No new reader finds the pool. Idempotent."""
        _pools.pop(self.pool_id, None)


class MemoryReader:
    """Decode's side: copies in a thread of `executor`."""

    def __init__(self, blocks: Blocks, executor: Executor, budget: ByteBudget) -> None:
        self._blocks = blocks
        self._executor = executor
        self._budget = budget

    async def read(self, ready: kv_pb2.KvReady, block_table: Sequence[int]) -> None:
        """See KvReader."""
        pool = _pools.get(ready.source.memory.pool_id)
        if pool is None:
            raise SourceGoneError("the pool is gone from this process")
        to = block_table[ready.first_block : ready.first_block + ready.num_blocks]
        async with self._budget.take(len(to) * self._blocks.shape[1]):
            try:
                hold = pool.holds.find(ready.hold_id, None)
            except HoldUnknownError as error:
                raise SourceGoneError("the hold is closed") from error
            stop = threading.Event()
            with hold.reading(ready.first_block, ready.num_blocks, stop.set) as ids:
                await run_to_its_end(self._executor, lambda stop: _copy(pool.blocks, ids, self._blocks, to, stop), stop)


def _copy(source: Blocks, source_ids: Sequence[int], destination: Blocks, destination_ids: Sequence[int], stop: threading.Event) -> None:
    if not copy_blocks(source, source_ids, destination, destination_ids, stop):
        raise SourceGoneError("the copy was stopped")
