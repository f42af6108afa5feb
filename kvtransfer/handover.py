"""Decode's side of one hand-over: which blocks of a prompt have arrived, exactly once each, and whether they cover it (design rule 2)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvtransfer.errors import HandoverError, HandoverProtocolError
from kvtransfer.path import Destination, KvPath
from kvtransfer.quarantine import Quarantine
from kvtransfer.transport import References
from tandem.v1 import kv_pb2

_T = TypeVar("_T")


def _look_at(future: asyncio.Future[_T]) -> None:
    """A failure that nobody waits for any more is not reported as lost."""
    if not future.cancelled():
        future.exception()


@dataclass(slots=True)
class TransferRecord:
    """What a hand-over has moved; times are `time.monotonic_ns()`."""

    transport: str = ""
    num_blocks: int = 0
    """Prefill's blocks."""
    num_bytes: int = 0
    wire_ns: int = 0
    """Time in which a run was being read."""
    hidden_ns: int = 0
    """Of this, the time before the prompt was computed."""
    started_ns: int = 0
    ended_ns: int = 0


class Handover:
    """Reads announced runs one behind the other, in a task with a reader's reference of its own on all destination blocks.

    A run out of order, twice, overlapping, empty or beyond the prompt, or from another hold, fails the hand-over for good. Blocks are counted in prefill's.
    `stop` must be called in the end, whatever happened.
    """

    def __init__(self, destination: Destination, path: KvPath, references: References, quarantine: Quarantine) -> None:
        self.record = TransferRecord(path.transport)
        self.hold_id = ""
        self._to = destination
        self._path = path
        self._first_block, self._end_block = path.source_range(destination)
        self._references = references
        self._quarantine = quarantine
        self._reader_id = secrets.token_hex(8)
        self._run_started_ns = 0
        self._num_announced = 0
        # Bounded by the protocol: every run is of at least one new block.
        self._runs: asyncio.Queue[kv_pb2.KvReady] = asyncio.Queue()
        self._task = asyncio.create_task(self._read_all(), name=f"handover {destination.seq_id}")

    @property
    def num_blocks(self) -> int:
        """Blocks to read."""
        return self._end_block - self._first_block

    def announce(self, ready: kv_pb2.KvReady) -> None:
        """Takes the next run. Raises HandoverProtocolError for any other."""
        due = self._first_block + self._num_announced
        if ready.first_block != due or not 0 < ready.num_blocks <= self._end_block - due:
            raise HandoverProtocolError(f"blocks {ready.first_block}+{ready.num_blocks} were announced, {due} to {self._end_block} (exclusive) are due")
        if not ready.hold_id or (self._num_announced and ready.hold_id != self.hold_id):
            raise HandoverProtocolError("the hold changed within a hand-over")
        self.hold_id = ready.hold_id
        self._num_announced += ready.num_blocks
        self._runs.put_nowait(ready)

    async def covered(self, unless: asyncio.Future[Any] | None = None) -> int:
        """Waits until each block has been read exactly once; returns their number.

        Raises HandoverError when blocks were not announced or a read failed, and what `unless` has ended with, or HandoverProtocolError, when that ends first.
        """
        if self._num_announced != self.num_blocks:
            raise HandoverProtocolError(f"{self._num_announced} of {self.num_blocks} blocks were announced")
        if not self._task.done():
            await asyncio.wait({self._task} if unless is None else {self._task, unless}, return_when=asyncio.FIRST_COMPLETED)
        if unless is not None and not self._task.done():
            unless.result()
            raise HandoverProtocolError("prefill spoke before decode had copied")
        self._raise_failure()
        if self.record.num_blocks != self.num_blocks:
            raise HandoverProtocolError(f"{self.record.num_blocks} of {self.num_blocks} blocks were read")
        return self.record.num_blocks

    async def guard(self, step: Awaitable[_T]) -> _T:
        """Awaits a step of the conversation, and raises what ended the reading if that fails first; the step is then cancelled.

        Where both have ended the step tells more: a hold that is closed ends reads, and why it was closed is in the status of the RPC.
        """
        waiting = asyncio.ensure_future(step)
        try:
            while not waiting.done():
                self._raise_failure()
                await asyncio.wait({waiting, self._task} if not self._task.done() else {waiting}, return_when=asyncio.FIRST_COMPLETED)
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

    def computed(self) -> None:
        """The prompt has been computed: what is read from now on is not hidden behind compute."""
        now_ns = time.monotonic_ns()
        self.record.hidden_ns = self.record.wire_ns + (now_ns - self._run_started_ns if self._run_started_ns else 0)

    async def _read_all(self) -> None:
        if self.num_blocks == 0:
            return
        first, end = self._path.own_range(self._to)
        try:
            pool_ids = await self._references.acquire(self._reader_id, self._to.seq_id, first, end - first)
            if pool_ids != tuple(self._to.block_table[first:end]):
                raise HandoverError("the reserved blocks are not those of the reservation")
            while self.record.num_blocks < self.num_blocks:
                await self._read(await self._runs.get())
        finally:
            self._references.drop(self._reader_id)

    async def _read(self, ready: kv_pb2.KvReady) -> None:
        record = self.record
        self._run_started_ns = time.monotonic_ns()
        record.started_ns = record.started_ns or self._run_started_ns
        await self._path.read(ready, self._to)
        record.ended_ns = time.monotonic_ns()
        record.wire_ns += record.ended_ns - self._run_started_ns
        self._run_started_ns = 0
        record.num_blocks += ready.num_blocks
        record.num_bytes += ready.num_blocks * self._path.source_block_bytes
