"""Faults on decode's side: around the read of every transport's reader."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from checks.handover_faults_kinds import IN_TRANSIT, PAUSING, Kind, Order, Pause
from checks.handover_faults_line import Line, put_around
from kvtransfer.block_copy import CopyBlocks, CopyStop
from kvtransfer.errors import HandoverError, TransferError
from kvtransfer.handover import Handover
from kvtransfer.inline import InlineReader
from kvtransfer.memories import Blocks, host_array
from kvtransfer.nixl_reader import NixlReader
from kvtransfer.path import segments
from kvtransfer.shared_memory import SharedMemoryReader
from kvtransfer.transport import Rows
from tandem.v1 import kv_pb2

Read = Callable[[kv_pb2.KvReady, Rows], Awaitable[None]]
_KINDS = frozenset({Kind.ERROR_ON_BLOCK, *IN_TRANSIT, *PAUSING}) - {Kind.STALE_DURING_COPY}
_READERS: tuple[type[Any], ...] = (InlineReader, SharedMemoryReader, NixlReader)
_COMPUTED_S = 10.0
_EXPONENT = 0x04
"""Of a float32's top byte: with it flipped a number is 256 times as large or as small, and still one."""


class FaultyReads:
    """Puts itself around `read` of the readers. A run of one block is let through: it has no middle."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.first_block = 0
        """Of the run that is being read."""
        self._computed = asyncio.Event()

    def install(self) -> None:
        """From now on, every reader of every transport in this process."""
        for reader in _READERS:
            put_around(reader, "read", self._with_faults)
        put_around(SharedMemoryReader, "__init__", self._with_faulty_copy)
        put_around(Handover, "computed", self._with_word)

    def _with_word(self, computed: Any) -> Any:
        def told(handover: Handover) -> None:
            computed(handover)
            self._computed.set()

        return told

    def _with_faulty_copy(self, make: Any) -> Any:
        def made(reader: SharedMemoryReader, *arguments: Any, **options: Any) -> None:
            make(reader, *arguments, **options)
            reader._copy_blocks = self._copying(reader._copy_blocks)

        return made

    def _copying(self, copy: CopyBlocks) -> CopyBlocks:
        """The copy itself, which can wait in the middle: behind the look at the generations that is in front of it."""

        def copying(source: Blocks, source_ids: Any, destination: Blocks, destination_ids: Any, stop: CopyStop) -> bool:
            order = self._line.take({Kind.STALE_DURING_COPY}, self.first_block) if len(source_ids) > 1 else None
            if order is None:
                return copy(source, source_ids, destination, destination_ids, stop)
            num_before = random.Random(order.seed).randrange(len(source_ids))
            self._line.injected(order)
            return (
                copy(source, source_ids[:num_before], destination, destination_ids[:num_before], stop)
                and self._line.wait(Pause(self.first_block + num_before, len(source_ids) - num_before))
                and copy(source, source_ids[num_before:], destination, destination_ids[num_before:], stop)
            )

        return copying

    def _with_faults(self, read: Any) -> Any:
        async def faulty(reader: Any, ready: kv_pb2.KvReady, to: Rows) -> None:
            self.first_block = ready.first_block
            if ready.first_block == 0:
                self._computed.clear()
            # What prefill writes is damaged in the slot, in front of decode's look at it.
            kinds = _KINDS - IN_TRANSIT if getattr(reader, "direction", "") == "write" else _KINDS
            order = self._line.take(kinds, ready.first_block) if ready.num_blocks > 1 else None

            async def plainly(ready: kv_pb2.KvReady, to: Rows) -> None:
                await read(reader, ready, to)

            await (self._fail(order, plainly, ready, to) if order is not None else plainly(ready, to))

        return faulty

    async def _fail(self, order: Order, read: Read, ready: kv_pb2.KvReady, to: Rows) -> None:
        place = random.Random(order.seed)
        if order.kind in PAUSING:
            await self._pause_within(order, place, read, ready, to)
        elif order.kind is Kind.ERROR_ON_BLOCK:
            await self._stop_within(order, place, read, ready, to)
        else:
            await self._alter(order, place, read, ready, to)

    async def _pause_within(self, order: Order, place: random.Random, read: Read, ready: kv_pb2.KvReady, to: Rows) -> None:
        num_before = place.randrange(ready.num_blocks)
        await _read_blocks(read, ready, to, 0, num_before)
        if order.kind is Kind.KILLED_PREFILL and not self._line.verifies:
            # Whoever believes everything believes a peer that is dead, too; before PrefillDone there is nothing to believe.
            await asyncio.wait_for(self._computed.wait(), _COMPUTED_S)
        self._line.injected(order)
        await self._line.pause(Pause(ready.first_block + num_before, ready.num_blocks - num_before))
        try:
            await _read_blocks(read, ready, to, num_before, ready.num_blocks)
        except HandoverError:
            if self._line.verifies:
                raise

    async def _stop_within(self, order: Order, place: random.Random, read: Read, ready: kv_pb2.KvReady, to: Rows) -> None:
        num_before = place.randrange(ready.num_blocks)
        await _read_blocks(read, ready, to, 0, num_before)
        self._line.injected(order)
        if self._line.verifies:
            raise TransferError(f"injected: block {ready.first_block + num_before} could not be read")

    async def _alter(self, order: Order, place: random.Random, read: Read, ready: kv_pb2.KvReady, to: Rows) -> None:
        blocks = host_array(to.memory)
        before = blocks[list(to.ids)]
        await read(ready, to)
        arrived = blocks[list(to.ids)]
        found = damaged(order.kind, place, before, arrived)
        for row, block in enumerate(to.ids):
            blocks[block] = found[row]
        self._line.injected(order)


def damaged(kind: Kind, place: random.Random, before: Any, arrived: Any) -> Any:
    """What is to be in the destination instead of `arrived`; both are [blocks, bytes]. At least one byte differs."""
    found = arrived.copy()
    while np.array_equal(found, arrived):
        row, other = place.sample(range(len(arrived)), 2)
        if kind is Kind.SWAPPED_BLOCKS:
            # Attention does not mind the order of full blocks, whose keys carry their positions; it minds the place of a prompt's last one, seldom full.
            row = len(arrived) - 1 if other != len(arrived) - 1 else row
            found[[row, other]] = arrived[[other, row]]
        elif kind is Kind.FLIPPED_BYTE:
            # Every second one where it hurts most, the others anywhere.
            byte = place.randrange(arrived.shape[1])
            top = place.random() < 0.5
            found[row, byte | 3 if top else byte] ^= _EXPONENT if top else place.randrange(1, 256)
        else:
            begin = place.randrange(arrived.shape[1] // 2)
            found[row, begin:] = before[row, begin:]
    return found


async def _read_blocks(read: Read, ready: kv_pb2.KvReady, to: Rows, first: int, end: int) -> None:
    """The run's blocks [first, end), by the real reader."""
    parts = [part for part in segments(ready, 1) if first <= part.first_block - ready.first_block < end]
    if parts:
        await read(_joined(parts), Rows(to.memory, to.ids[first:end]))


def _joined(parts: list[kv_pb2.KvReady]) -> kv_pb2.KvReady:
    run = kv_pb2.KvReady(hold_id=parts[0].hold_id, first_block=parts[0].first_block, num_blocks=len(parts))
    for part in parts:
        run.block_ids.extend(part.block_ids)
        run.generations.extend(part.generations)
        run.digests.extend(part.digests)
    return run
