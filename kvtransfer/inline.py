"""Transport `inline`: blocks as raw bytes over PrefillService.ReadKv, on a channel that carries nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from kvtransfer.budget import ByteBudget, ProgressLimit
from kvtransfer.chunks import MAX_CHUNK_BYTES, RunCheck, pack_chunk
from kvtransfer.copying import Blocks
from kvtransfer.errors import HandoverProtocolError, SourceGoneError
from kvtransfer.hold import Holds
from tandem.v1 import kv_pb2, prefill_pb2

READ_KV = "/tandem.v1.PrefillService/ReadKv"


class InlineSource:
    """Prefill's side: whoever can call the service can read."""

    def __init__(self, blocks: Blocks, holds: Holds, *, chunk_bytes: int = MAX_CHUNK_BYTES, new_limit: Callable[[], ProgressLimit] = ProgressLimit) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes must be from 1 to {MAX_CHUNK_BYTES}, got {chunk_bytes}")
        self._blocks = blocks
        self._holds = holds
        self._chunk_bytes = chunk_bytes
        self._new_limit = new_limit

    def reachable(self, process_id: str) -> bool:
        """Every decode process."""
        return True

    def describe(self) -> kv_pb2.KvSource:
        """Only the size of a chunk: the instance that was called is the one to read from."""
        return kv_pb2.KvSource(inline=kv_pb2.InlineSource(chunk_bytes=self._chunk_bytes))

    async def send(self, request: prefill_pb2.ReadKvRequest, host: str, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes the run that a peer at `host` asks for, chunk by chunk, and ends at once when its hold is closed.

        Raises HoldUnknownError, HandoverProtocolError, SourceGoneError, StalledError.
        """
        hold = self._holds.find(request.hold_id, host)
        task = asyncio.current_task()
        assert task is not None
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        try:
            with hold.reading(request.first_block, request.num_blocks, stop) as ids:
                await self._write_run(request, ids, write)
        except asyncio.CancelledError:
            # A cancel of the hold's own making is an answer to the peer; any other is the end of the RPC.
            if stopped and task.uncancel() == 0:
                raise SourceGoneError("the hold was closed") from None
            raise

    async def _write_run(self, request: prefill_pb2.ReadKvRequest, ids: Sequence[int], write: Callable[[bytes], Awaitable[None]]) -> None:
        limit = self._new_limit()
        for offset, parts, last in self._chunks(ids):
            message = pack_chunk(request.first_block, request.num_blocks, offset, parts, last=last, checksum=request.checksum)
            await limit.wait(write(message))
            limit.moved(len(message))

    def _chunks(self, ids: Sequence[int]) -> Iterator[tuple[int, list[memoryview], bool]]:
        block_bytes = self._blocks.shape[1]
        total = len(ids) * block_bytes
        for offset in range(0, total, self._chunk_bytes):
            end = min(offset + self._chunk_bytes, total)
            parts = [memoryview(self._blocks[ids[index]])[within:until] for index, within, until in _pieces(offset, end, block_bytes)]
            yield offset, parts, end == total


def _pieces(start: int, end: int, block_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Byte range [start, end) of a run as (block of the run, first byte, end byte) within each block."""
    while start < end:
        index, within = divmod(start, block_bytes)
        until = min(block_bytes, within + end - start)
        yield index, within, until
        start += until - within


@dataclass(frozen=True, slots=True)
class InlineLimits:
    """How decode reads."""

    checksum: bool = False
    """Ask for a digest with each chunk, and refuse chunks without one."""
    new_progress_limit: Callable[[], ProgressLimit] = ProgressLimit


class InlineReader:
    """Decode's side of one prefill instance. Copies on the event loop, in calls of at most a chunk that release the GIL: nothing outlives a cancel."""

    def __init__(self, blocks: Blocks, channel: grpc.aio.Channel, budget: ByteBudget, limits: InlineLimits) -> None:
        self._blocks = blocks
        self._budget = budget
        self._limits = limits
        # No deserializer: the bytes of the message as they came.
        self._read_kv: grpc.aio.UnaryStreamMultiCallable[prefill_pb2.ReadKvRequest, bytes] = channel.unary_stream(
            READ_KV, request_serializer=prefill_pb2.ReadKvRequest.SerializeToString
        )

    async def read(self, ready: kv_pb2.KvReady, block_table: Sequence[int]) -> None:
        """See KvReader."""
        to = block_table[ready.first_block : ready.first_block + ready.num_blocks]
        check = RunCheck(ready.first_block, ready.num_blocks, len(to) * self._blocks.shape[1], self._limits.checksum)
        request = prefill_pb2.ReadKvRequest(hold_id=ready.hold_id, first_block=ready.first_block, num_blocks=ready.num_blocks, checksum=self._limits.checksum)
        async with self._budget.take(check.num_bytes):
            call = self._read_kv(request)
            try:
                await self._receive(call, check, to)
            except grpc.aio.AioRpcError as error:
                raise _handover_error(error) from error
            except asyncio.CancelledError:
                # grpc.aio raises it as well when the peer ended the call with CANCELLED; only a cancel of this task's own passes as one.
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise SourceGoneError("ReadKv was cancelled by the peer") from None
            finally:
                call.cancel()

    async def _receive(self, call: grpc.aio.UnaryStreamCall[prefill_pb2.ReadKvRequest, bytes], check: RunCheck, to: Sequence[int]) -> None:
        limit = self._limits.new_progress_limit()
        while True:
            message = await limit.wait(call.read())
            if not isinstance(message, bytes):  # grpc.aio.EOF
                break
            offset, payload = check.accept(message)
            self._scatter(offset, payload, to)
            limit.moved(len(message))
        check.finish()

    def _scatter(self, offset: int, payload: memoryview, to: Sequence[int]) -> None:
        taken = 0
        for index, within, until in _pieces(offset, offset + len(payload), self._blocks.shape[1]):
            np.copyto(self._blocks[to[index], within:until], np.frombuffer(payload, np.uint8, until - within, taken))
            taken += until - within


def _handover_error(error: grpc.aio.AioRpcError) -> HandoverProtocolError | SourceGoneError:
    text = f"ReadKv ended {error.code().name}: {error.details()}"
    return HandoverProtocolError(text) if error.code() is grpc.StatusCode.INVALID_ARGUMENT else SourceGoneError(text)
