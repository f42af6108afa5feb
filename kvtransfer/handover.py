"""Decode's side of one hand-over: which blocks of a prompt have arrived, exactly once each, and whether they cover it (design rule 2)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtransfer.errors import HandoverError, HandoverProtocolError
from kvtransfer.quarantine import Quarantine
from kvtransfer.transport import KvReader, References
from tandem.v1 import kv_pb2

_T = TypeVar("_T")


def _look_at(future: asyncio.Future[_T]) -> None:
    """A failure that nobody waits for any more is not reported as lost."""
    if not future.cancelled():
        future.exception()


@dataclass(frozen=True, slots=True)
class Destination:
    """Reserved blocks that a hand-over fills."""

    seq_id: str
    block_table: Sequence[int]
    """Pool ids of the sequence's blocks, at least the prompt's."""
    first_block: int
    """First block to fill; those before it are in decode's prefix cache."""
    end_block: int
    """Blocks of the prompt."""
    block_bytes: int


@dataclass(slots=True)
class TransferRecord:
    """What a hand-over has moved; times are `time.monotonic_ns()`."""

    transport: str = ""
    num_blocks: int = 0
    num_bytes: int = 0
    wire_ns: int = 0
    """Time in which a run was being read."""
    started_ns: int = 0
    ended_ns: int = 0


class Handover:
    """Reads announced runs one behind the other, in a task with a reader's reference of its own on all destination blocks.

    A run out of order, twice, overlapping, empty or beyond the prompt, or from another hold or transport, fails the hand-over for good.
    `stop` must be called in the end, whatever happened.
    """

    def __init__(self, destination: Destination, readers: Mapping[str, KvReader], references: References, quarantine: Quarantine) -> None:
        self.record = TransferRecord()
        self.hold_id = ""
        self._to = destination
        self._readers = readers
        self._references = references
        self._quarantine = quarantine
        self._reader_id = secrets.token_hex(8)
        self._num_announced = 0
        # Bounded by the protocol: every run is of at least one new block.
        self._runs: asyncio.Queue[kv_pb2.KvReady] = asyncio.Queue()
        self._task = asyncio.create_task(self._read_all(), name=f"handover {destination.seq_id}")

    @property
    def num_blocks(self) -> int:
        """Blocks to read."""
        return self._to.end_block - self._to.first_block

    def announce(self, ready: kv_pb2.KvReady) -> None:
        """Takes the next run. Raises HandoverProtocolError for any other."""
        due = self._to.first_block + self._num_announced
        if ready.first_block != due or not 0 < ready.num_blocks <= self._to.end_block - due:
            raise HandoverProtocolError(f"blocks {ready.first_block}+{ready.num_blocks} were announced, {due} to {self._to.end_block} (exclusive) are due")
        transport = ready.source.WhichOneof("transport") or ""
        if transport not in self._readers:
            raise HandoverProtocolError(f"transport {transport or 'unknown'} was not offered")
        if not ready.hold_id or (self._num_announced and (ready.hold_id, transport) != (self.hold_id, self.record.transport)):
            raise HandoverProtocolError("the hold or the transport changed within a hand-over")
        self.hold_id, self.record.transport = ready.hold_id, transport
        self._num_announced += ready.num_blocks
        self._runs.put_nowait(ready)

    async def covered(self) -> int:
        """Waits until each block has been read exactly once; returns their number. Raises HandoverError when blocks were not announced or a read failed."""
        if self._num_announced != self.num_blocks:
            raise HandoverProtocolError(f"{self._num_announced} of {self.num_blocks} blocks were announced")
        await asyncio.wait({self._task})
        self._raise_failure()
        if self.record.num_blocks != self.num_blocks:
            raise HandoverProtocolError(f"{self.record.num_blocks} of {self.num_blocks} blocks were read")
        return self.record.num_blocks

    async def guard(self, step: Awaitable[_T]) -> _T:
        """Awaits a step of the conversation, and raises what ended the reading if that fails first; the step is then cancelled."""
        waiting = asyncio.ensure_future(step)
        try:
            while not waiting.done():
                await asyncio.wait({waiting, self._task} if not self._task.done() else {waiting}, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failure()
            return await waiting
        finally:
            waiting.cancel()
            waiting.add_done_callback(_look_at)

    def _raise_failure(self) -> None:
        if not self._task.done():
            return
        if self._task.cancelled():
            raise HandoverError("the hand-over was stopped")
        error = self._task.exception()
        if isinstance(error, HandoverError):
            raise error
        if error is not None:
            raise HandoverError(f"reading failed: {error}") from error

    def stop(self) -> None:
        """Ends the reading. The reference on the blocks goes when the reader can touch them no more, maybe after this; no await, idempotent."""
        self._task.add_done_callback(_look_at)
        if not self._task.done():
            self._quarantine.enter(self._reader_id)
            self._task.add_done_callback(lambda _: self._quarantine.leave(self._reader_id))
            self._task.cancel()

    async def stopped(self) -> None:
        """Waits until the reader can touch the blocks no more."""
        await asyncio.wait({self._task})

    async def _read_all(self) -> None:
        if self.num_blocks == 0:
            return
        try:
            pool_ids = await self._references.acquire(self._reader_id, self._to.seq_id, self._to.first_block, self.num_blocks)
            if pool_ids != tuple(self._to.block_table[self._to.first_block : self._to.end_block]):
                raise HandoverError("the reserved blocks are not those of the reservation")
            while self.record.num_blocks < self.num_blocks:
                await self._read(await self._runs.get())
        finally:
            self._references.drop(self._reader_id)

    async def _read(self, ready: kv_pb2.KvReady) -> None:
        record = self.record
        started_ns = time.monotonic_ns()
        record.started_ns = record.started_ns or started_ns
        await self._readers[record.transport].read(ready, self._to.block_table)
        record.ended_ns = time.monotonic_ns()
        record.wire_ns += record.ended_ns - started_ns
        record.num_blocks += ready.num_blocks
        record.num_bytes += ready.num_blocks * self._to.block_bytes
