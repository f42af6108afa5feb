"""Transport `inline`: blocks as raw bytes over PrefillService.ReadKv, on a channel that carries nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

import grpc
import numpy as np

from kvtransfer.budget import ProgressLimit
from kvtransfer.chunks import MAX_CHUNK_BYTES, RunCheck, pack_chunk
from kvtransfer.errors import HandoverProtocolError, SourceGoneError
from kvtransfer.hold import Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.memories import Blocks, host_array
from kvtransfer.pairing import Pairing
from kvtransfer.transport import Probe, Rows
from tandem.v1 import kv_pb2, prefill_pb2

READ_KV = "/tandem.v1.PrefillService/ReadKv"
_Chunk = tuple[int, list[memoryview], bool]
"""Offset in the run, the bytes, and whether it is the last one."""


class InlineSource:
    """Prefill's side: whoever has paired can read what it was told of."""

    name = "inline"
    one_sided = False

    def __init__(self, pool: HostPool, holds: Holds, *, chunk_bytes: int = MAX_CHUNK_BYTES, new_limit: Callable[[], ProgressLimit] = ProgressLimit) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes must be from 1 to {MAX_CHUNK_BYTES}, got {chunk_bytes}")
        self._pool = pool
        self._holds = holds
        self._chunk_bytes = chunk_bytes
        self._new_limit = new_limit

    async def offer(self, pairing: Pairing) -> kv_pb2.KvSource:
        """See KvSource: to everybody. Only the size of a chunk: the instance that was called is the one to read from."""
        return kv_pb2.KvSource(inline=kv_pb2.InlineSource(chunk_bytes=self._chunk_bytes))

    def withdraw(self, pairing_id: str) -> None:
        """See KvSource: nothing was made."""

    async def send(self, request: prefill_pb2.ReadKvRequest, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes the run that an open pairing asks for, chunk by chunk, and ends at once when its hold is closed.

        Raises HoldUnknownError, HandoverProtocolError, SourceGoneError, StalledError.
        """
        if not request.hold_id and not request.num_blocks:
            await self._write_all(0, 0, self._probe_chunks(), write)
            return
        hold = self._holds.find(request.hold_id, request.pairing_id)
        task = asyncio.current_task()
        assert task is not None
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        try:
            with hold.reading(request.first_block, request.num_blocks, stop) as ids:
                await self._write_all(request.first_block, request.num_blocks, self._chunks(ids), write)
        except asyncio.CancelledError:
            # A cancel of the hold's own making is an answer to the peer; any other is the end of the RPC.
            if stopped and task.uncancel() == 0:
                raise SourceGoneError("the hold was closed") from None
            raise

    async def _write_all(self, first_block: int, num_blocks: int, chunks: Iterable[_Chunk], write: Callable[[bytes], Awaitable[None]]) -> None:
        limit = self._new_limit()
        for offset, parts, last in chunks:
            message = pack_chunk(first_block, num_blocks, offset, parts, last=last)
            await limit.wait(write(message))
            limit.moved(len(message))

    def _chunks(self, ids: Sequence[int]) -> Iterator[_Chunk]:
        blocks, block_bytes = self._pool.memory.array, self._pool.memory.block_bytes
        total = len(ids) * block_bytes
        for offset in range(0, total, self._chunk_bytes):
            end = min(offset + self._chunk_bytes, total)
            parts = [memoryview(blocks[ids[index]])[within:until] for index, within, until in _pieces(offset, end, block_bytes)]
            yield offset, parts, end == total

    def _probe_chunks(self) -> Iterator[_Chunk]:
        probe = self._pool.probe
        for offset in range(0, len(probe), self._chunk_bytes):
            part = probe[offset : offset + self._chunk_bytes]
            yield offset, [part], offset + len(part) == len(probe)


def _pieces(start: int, end: int, block_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Byte range [start, end) of a run as (block of the run, first byte, end byte) within each block."""
    while start < end:
        index, within = divmod(start, block_bytes)
        until = min(block_bytes, within + end - start)
        yield index, within, until
        start += until - within


class InlineReader:
    """Decode's side of one pairing. Copies on the event loop, in calls of at most a chunk that release the GIL: nothing outlives a cancel."""

    name = "inline"
    max_segment_bytes = 64 << 20

    def __init__(self, channel: grpc.aio.Channel, *, new_progress_limit: Callable[[], ProgressLimit] = ProgressLimit) -> None:
        self._new_limit = new_progress_limit
        # No deserializer: the bytes of the message as they came.
        self._read_kv: grpc.aio.UnaryStreamMultiCallable[prefill_pb2.ReadKvRequest, bytes] = channel.unary_stream(
            READ_KV, request_serializer=prefill_pb2.ReadKvRequest.SerializeToString
        )
        self._pairing_id = ""
        self._probe_bytes = 0
        self._closed = False

    def greet(self, start: prefill_pb2.PairStart) -> None:
        """See KvReader: there is nothing to tell."""

    async def attach(self, offer: prefill_pb2.PairResponse, source: kv_pb2.KvSource) -> None:
        """See KvReader: there is nothing to reach but the instance itself."""
        self._pairing_id, self._probe_bytes = offer.pairing_id, offer.probe_bytes

    async def probe(self) -> Probe:
        """See KvReader."""
        content = np.empty((1, self._probe_bytes), np.uint8)
        started = time.perf_counter()
        await self._read(prefill_pb2.ReadKvRequest(pairing_id=self._pairing_id), RunCheck(0, 0, self._probe_bytes), content, (0,))
        return Probe(memoryview(content[0]), time.perf_counter() - started)

    async def read(self, ready: kv_pb2.KvReady, to: Rows) -> None:
        """See KvReader."""
        blocks = host_array(to.memory)
        check = RunCheck(ready.first_block, ready.num_blocks, len(to.ids) * blocks.shape[1])
        request = prefill_pb2.ReadKvRequest(pairing_id=self._pairing_id, hold_id=ready.hold_id, first_block=ready.first_block, num_blocks=ready.num_blocks)
        await self._read(request, check, blocks, to.ids)

    def close(self) -> None:
        """See KvReader: the channel is its owner's."""
        self._closed = True

    async def _read(self, request: prefill_pb2.ReadKvRequest, check: RunCheck, blocks: Blocks, to: Sequence[int]) -> None:
        if self._closed:
            raise SourceGoneError("the reader is closed")
        call = self._read_kv(request)
        try:
            await self._receive(call, check, blocks, to)
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

    async def _receive(self, call: grpc.aio.UnaryStreamCall[prefill_pb2.ReadKvRequest, bytes], check: RunCheck, blocks: Blocks, to: Sequence[int]) -> None:
        limit = self._new_limit()
        while True:
            message = await limit.wait(call.read())
            if not isinstance(message, bytes):  # grpc.aio.EOF
                break
            offset, payload = check.accept(message)
            _scatter(offset, payload, blocks, to)
            limit.moved(len(message))
        check.finish()


def _scatter(offset: int, payload: memoryview, blocks: Blocks, to: Sequence[int]) -> None:
    taken = 0
    for index, within, until in _pieces(offset, offset + len(payload), blocks.shape[1]):
        np.copyto(blocks[to[index], within:until], np.frombuffer(payload, np.uint8, until - within, taken))
        taken += until - within


def _handover_error(error: grpc.aio.AioRpcError) -> HandoverProtocolError | SourceGoneError:
    text = f"ReadKv ended {error.code().name}: {error.details()}"
    return HandoverProtocolError(text) if error.code() is grpc.StatusCode.INVALID_ARGUMENT else SourceGoneError(text)
