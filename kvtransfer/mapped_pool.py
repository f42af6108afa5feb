"""Prefill's pool as decode maps it: blocks, the probe's bytes, and the generations of the blocks."""

from __future__ import annotations

import struct
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from engine.kv_cache import HostKvCache
from engine.proto import kv_layout_from_proto
from kvtransfer.errors import NoTransportError
from kvtransfer.memories import Blocks
from kvtransfer.sealed_mapping import SealedMapping
from tandem.v1 import prefill_pb2

_FIELDS = struct.Struct("<6Q")
_GENERATION_BYTES = 4


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Where what is in a pool's memory. Offsets and sizes in bytes."""

    num_blocks: int
    block_bytes: int
    probe_offset: int
    probe_bytes: int
    generations_offset: int
    num_bytes: int

    @classmethod
    def of(cls, cache: HostKvCache) -> PoolPlan:
        """Prefill's own."""
        return cls(cache.num_blocks, cache.layout.block_bytes, cache.probe_offset, len(cache.probe), cache.generations_offset, cache.num_bytes)

    def encode(self) -> bytes:
        """For the way to decode."""
        return _FIELDS.pack(*astuple(self))

    @classmethod
    def decode(cls, encoded: bytes, offer: prefill_pb2.PairResponse) -> PoolPlan:
        """Raises NoTransportError for a plan that is none, or not that of the pool that was offered."""
        if len(encoded) != _FIELDS.size:
            raise NoTransportError(f"a pool's plan must have {_FIELDS.size} bytes, got {len(encoded)}")
        plan = cls(*_FIELDS.unpack(encoded))
        if (plan.num_blocks, plan.block_bytes, plan.probe_bytes) != (offer.num_blocks, kv_layout_from_proto(offer.layout).block_bytes, offer.probe_bytes):
            raise NoTransportError("the pool is not the one that was offered")
        ends = (plan.num_blocks * plan.block_bytes, plan.probe_offset + plan.probe_bytes, plan.generations_offset + _GENERATION_BYTES * plan.num_blocks)
        starts = (plan.probe_offset, plan.generations_offset, plan.num_bytes)
        if plan.generations_offset % _GENERATION_BYTES or any(end > start for end, start in zip(ends, starts, strict=True)):
            raise NoTransportError("the parts of the pool overlap or go beyond it")
        return plan


class MappedPool:
    """A mapping of prefill's pool. Its arrays are for who is within `reading`, in any thread; the rest lives on the event loop."""

    def __init__(self, fd: int, plan: PoolPlan, executor: Executor) -> None:
        """As of SealedMapping."""
        self.plan = plan
        self._mapping = SealedMapping(fd, plan.num_bytes, executor)

    @property
    def blocks(self) -> Blocks:
        """[num_blocks, block_bytes]."""
        return self._mapping.view(0, self.plan.num_blocks * self.plan.block_bytes).reshape(self.plan.num_blocks, self.plan.block_bytes)

    @property
    def probe(self) -> npt.NDArray[np.uint8]:
        """[probe_bytes]."""
        return self._mapping.view(self.plan.probe_offset, self.plan.probe_bytes)

    def are_held(self, block_ids: npt.NDArray[np.int64], generations: npt.NDArray[np.uint32]) -> bool:
        """The blocks have these generations now: since they got them, nobody gave one to another use.

        This is the reading half of a sequence lock. Asked behind a copy it speaks for every byte of it, given that the copy's loads are all done (copy_blocks
        sees to that) and that a generation is stored before the bytes of the block's next use, in the order that others see: prefill's engine thread stores
        it, and the step that writes the block starts behind that, which x86-64 keeps in order by itself and other processors by the locks that the thread gives
        back and takes in between.
        """
        table = self._mapping.view(self.plan.generations_offset, _GENERATION_BYTES * self.plan.num_blocks).view(np.uint32)
        return bool((table[block_ids] == generations).all())

    async def populate(self) -> None:
        """As of SealedMapping."""
        await self._mapping.populate()

    def reading(self) -> AbstractContextManager[None]:
        """As of SealedMapping."""
        return self._mapping.reading()

    def close(self) -> None:
        """As of SealedMapping."""
        self._mapping.close()
