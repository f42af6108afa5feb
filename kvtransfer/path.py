"""The path that KV takes from one prefill instance into this pool: a transport's reader, and around it what all transports do alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass

from engine.kv_cache import KvLayout
from kvtransfer.budget import ByteBudget
from kvtransfer.conversion import Conversion
from kvtransfer.copying import run_to_its_end
from kvtransfer.errors import DigestError, HandoverProtocolError
from kvtransfer.memories import BlockMemory
from kvtransfer.transport import KvReader, Rows
from tandem.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class Destination:
    """Reserved blocks that a hand-over fills."""

    seq_id: str
    block_table: Sequence[int]
    """Pool ids of the sequence's blocks, at least the prompt's."""
    num_cached_tokens: int
    """Leading tokens that decode's prefix cache has: whole blocks, which are never written to."""
    num_tokens: int
    """Tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class PathParts:
    """What the paths of a decode pool share, and what those from one instance share."""

    pool: BlockMemory
    layout: KvLayout
    executor: Executor
    """Runs digests and conversions."""
    budgets: Sequence[ByteBudget]
    """Of one instance, then of all: taken in this order, so that a slow instance keeps no more than its own share of the total."""
    checksum: bool = False
    """Ask for a digest of every block, and refuse blocks without one."""


class KvPath:
    """Reads runs segment by segment within the budgets, verifies digests, converts layouts that differ."""

    def __init__(self, parts: PathParts, reader: KvReader, source_layout: KvLayout, bytes_per_s: float) -> None:
        self.transport = reader.name
        self.bytes_per_s = bytes_per_s
        """What the probe moved."""
        self.checksum = parts.checksum
        self.source_block_size = source_layout.block_size
        """Tokens to a block of prefill's."""
        self.source_block_bytes = source_layout.block_bytes
        self._parts = parts
        self._reader = reader
        # A segment is not larger than any budget, so that the budgets bound what is staged and what a reader has in flight.
        budget_bytes = min(budget.max_bytes for budget in parts.budgets)
        self._max_segment_blocks = max(min(reader.max_segment_bytes, budget_bytes) // source_layout.block_bytes, 1)
        self._conversion = Conversion.between(source_layout, parts.layout, parts.pool, max_kept_bytes=budget_bytes)

    def source_range(self, to: Destination) -> tuple[int, int]:
        """First block and end (exclusive) of what has to be read, in prefill's blocks."""
        return block_range(to.num_cached_tokens, to.num_tokens, self.source_block_size)

    def own_range(self, to: Destination) -> tuple[int, int]:
        """The same in this pool's blocks."""
        return block_range(to.num_cached_tokens, to.num_tokens, self._parts.layout.block_size)

    async def read(self, ready: kv_pb2.KvReady, to: Destination) -> None:
        """Copies a run into the destination. As of KvReader.read; raises DigestError and HandoverProtocolError too."""
        require_whole(ready)
        for segment in segments(ready, self._max_segment_blocks):
            async with AsyncExitStack() as stack:
                for budget in self._parts.budgets:
                    await stack.enter_async_context(budget.take(segment.num_blocks * self.source_block_bytes))
                await self._read_segment(segment, to)

    async def _read_segment(self, segment: kv_pb2.KvReady, to: Destination) -> None:
        if self._conversion is None:
            rows = Rows(self._parts.pool, to.block_table[segment.first_block : segment.first_block + segment.num_blocks])
            await self._reader.read(segment, rows)
            await self._verify(segment, rows)
            return
        conversion = self._conversion
        with conversion.staging(segment.num_blocks) as memory:
            rows = Rows(memory, range(segment.num_blocks))
            await self._reader.read(segment, rows)
            await self._verify(segment, rows)
            await self._run(lambda stop: conversion.scatter(memory, segment, to.block_table, to.num_cached_tokens, to.num_tokens, stop))

    async def _verify(self, segment: kv_pb2.KvReady, rows: Rows) -> None:
        if not segment.digests:
            if self.checksum:
                raise DigestError(f"no digests came for blocks {segment.first_block}+{segment.num_blocks}")
            return
        found: list[int] = []
        await self._run(lambda _: found.extend(rows.memory.digests(rows.ids)))
        wrong = [segment.first_block + index for index, (one, other) in enumerate(zip(found, segment.digests, strict=True)) if one != other]
        if wrong:
            raise DigestError(f"the digests of {len(wrong)} blocks are wrong, the first is block {wrong[0]}")

    async def _run(self, work: Callable[[threading.Event], None]) -> None:
        await run_to_its_end(self._parts.executor, work, threading.Event())


def block_range(num_cached_tokens: int, num_tokens: int, block_size: int) -> tuple[int, int]:
    """First block and end (exclusive) of a prompt's blocks that hold tokens which decode lacks; both sides of a hand-over count by this."""
    end = -(-num_tokens // block_size)
    return (num_cached_tokens // block_size if num_cached_tokens < num_tokens else end), end


def require_whole(ready: kv_pb2.KvReady) -> None:
    """What is told block by block is told of each block or of none: a run is cut by it. Raises HandoverProtocolError, DigestError."""
    for name, told in (("block ids", ready.block_ids), ("generations", ready.generations)):
        if len(told) not in (0, ready.num_blocks):
            raise HandoverProtocolError(f"{len(told)} {name} came for {ready.num_blocks} blocks")
    if len(ready.digests) not in (0, ready.num_blocks):
        raise DigestError(f"{len(ready.digests)} digests came for {ready.num_blocks} blocks")


def segments(ready: kv_pb2.KvReady, max_blocks: int) -> Iterator[kv_pb2.KvReady]:
    """The run in pieces of at most `max_blocks` blocks, each with its own part of what is told block by block."""
    if ready.num_blocks <= max_blocks:
        yield ready
        return
    for start in range(0, ready.num_blocks, max_blocks):
        part = slice(start, start + max_blocks)
        yield kv_pb2.KvReady(
            hold_id=ready.hold_id,
            first_block=ready.first_block + start,
            num_blocks=min(max_blocks, ready.num_blocks - start),
            block_ids=ready.block_ids[part],
            generations=ready.generations[part],
            digests=ready.digests[part],
        )
