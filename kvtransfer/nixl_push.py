"""Having prefill write by NIXL: decode grants a slot, prefill writes into it and answers with digests, decode copies from the slot and verifies them.

A slot whose answer nobody waits for any more stays granted until prefill has said that it has stopped. Where it does not say so the region is burnt.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import grpc
import numpy as np
import xxhash

from kvtransfer.copying import run_to_its_end
from kvtransfer.errors import DigestError, HandoverError, HandoverProtocolError, SourceGoneError
from kvtransfer.memories import Blocks
from kvtransfer.nixl_staging import NixlStaging, Slot
from kvtransfer.transport import Probe
from tandem.v1 import kv_pb2, prefill_pb2

STOPPED = "tandem-stopped"
"""Key of WriteKv's trailing metadata that says that nothing writes to the slot any more."""
_NO_LANE = b"NO_TRANSPORT"
"""Within the status's details: the reason of an error that only another pairing can mend."""
WRITE_KV = "/tandem.v1.PrefillService/WriteKv"
MAX_WRITE_S = 40.0
"""Longest time of one WriteKv: more than prefill gives a transfer to end by itself."""
MAX_ABANDONED_S = 5.0
"""Time in which prefill must say that it has stopped writing what nobody waits for."""


class _Write:
    """One slot being filled: owns it until prefill has stopped writing to it."""

    def __init__(self, push: NixlPush, request: prefill_pb2.WriteKvRequest) -> None:
        self._push = push
        self._request = request
        self._call: Any = None
        self.slot: Slot | None = None
        self.task = asyncio.create_task(self._run(), name="nixl write")

    async def _run(self) -> prefill_pb2.WriteKvResponse:
        staging = self._push.staging
        self.slot = await staging.take()
        self._request.slot, self._request.grant = self.slot.index, self.slot.grant
        with staging.agent.attending():
            self._call = self._push.write_kv(self._request, timeout=MAX_WRITE_S)
            try:
                response: prefill_pb2.WriteKvResponse = await self._call
                self._check_stopped(await self._call.trailing_metadata())
            except grpc.aio.AioRpcError as error:
                self._check_stopped(error.trailing_metadata())
                if _has_no_lane(error):
                    staging.burn("prefill can write no more")
                raise _handover_error(error) from error
            except asyncio.CancelledError:
                # Of this task by nobody but the end of the event loop; of the call, by its peer or by `_give_up`.
                staging.burn("WriteKv was cancelled")
                raise SourceGoneError("WriteKv was cancelled") from None
        if (response.slot, response.grant) != (self.slot.index, self.slot.grant):
            staging.burn("prefill answered for another grant")
            raise HandoverProtocolError("prefill answered for another grant")
        return response

    def _check_stopped(self, metadata: Any) -> None:
        if not any(key == STOPPED for key, _ in metadata or ()):
            self._push.staging.burn("prefill did not say that it has stopped writing")

    def leave(self) -> None:
        """The slot goes back: at once when the write has ended, else when it does. Idempotent, no await."""
        if self.task.done():
            self._give(self.task)
            return
        timer = asyncio.get_running_loop().call_later(MAX_ABANDONED_S, self._give_up)
        self.task.add_done_callback(self._give)
        self.task.add_done_callback(lambda _: timer.cancel())
        if self.slot is None:  # it only waits for one
            self.task.cancel()

    def _give_up(self) -> None:
        self._push.staging.burn("prefill did not stop writing in time")
        if self._call is not None:
            self._call.cancel()

    def _give(self, task: asyncio.Task[prefill_pb2.WriteKvResponse]) -> None:
        if not task.cancelled():
            task.exception()  # looked at
        slot, self.slot = self.slot, None
        if slot is not None and not self._push.staging.lost:
            self._push.staging.give(slot)


class NixlPush:
    """Of one pairing. Copies and digests in a thread of `executor`. Lives on the event loop."""

    def __init__(self, staging: NixlStaging, channel: grpc.aio.Channel, executor: Executor, offer: prefill_pb2.PairResponse) -> None:
        self.staging = staging
        self.write_kv: grpc.aio.UnaryUnaryMultiCallable[prefill_pb2.WriteKvRequest, prefill_pb2.WriteKvResponse] = channel.unary_unary(
            WRITE_KV, request_serializer=prefill_pb2.WriteKvRequest.SerializeToString, response_deserializer=prefill_pb2.WriteKvResponse.FromString
        )
        self._executor = executor
        self._pairing_id = offer.pairing_id
        self._probe_bytes = offer.probe_bytes

    async def probe(self) -> Probe:
        """See KvReader."""
        started = time.perf_counter()
        write = _Write(self, prefill_pb2.WriteKvRequest(pairing_id=self._pairing_id))
        try:
            await asyncio.shield(write.task)
            assert write.slot is not None
            content = np.array(write.slot.bytes[: self._probe_bytes])
            return Probe(content.data, time.perf_counter() - started)
        finally:
            write.leave()

    async def read(self, ready: kv_pb2.KvReady, blocks: Blocks, to: Sequence[int]) -> None:
        """See KvReader. Slots are filled ahead, and emptied in their order."""
        per_slot = max(self.staging.slot_bytes // blocks.shape[1], 1)
        writes: deque[tuple[_Write, Sequence[int]]] = deque()
        pieces = deque(range(0, ready.num_blocks, per_slot))
        try:
            while pieces or writes:
                while pieces and len(writes) < self.staging.num_slots:
                    start = pieces.popleft()
                    rows = to[start : start + per_slot]
                    writes.append((_Write(self, self._request(ready, start, len(rows))), rows))
                write, rows = writes[0]
                await self._empty(write, rows, blocks)
                writes.popleft()[0].leave()
        finally:
            for write, _ in writes:
                write.leave()

    def close(self, reason: str = "the reader is closed") -> None:
        """Idempotent, no await."""
        self.staging.close(reason)

    def _request(self, ready: kv_pb2.KvReady, start: int, count: int) -> prefill_pb2.WriteKvRequest:
        return prefill_pb2.WriteKvRequest(pairing_id=self._pairing_id, hold_id=ready.hold_id, first_block=ready.first_block + start, num_blocks=count)

    async def _empty(self, write: _Write, rows: Sequence[int], blocks: Blocks) -> None:
        response = await asyncio.shield(write.task)
        slot = write.slot
        assert slot is not None
        if len(response.digests) != len(rows):
            raise DigestError(f"{len(response.digests)} digests came for {len(rows)} blocks")
        wrong: list[int] = []

        def copy(stop: threading.Event) -> None:
            filled = slot.bytes[: len(rows) * blocks.shape[1]].reshape(len(rows), -1)
            for source, row, digest in zip(filled, rows, response.digests, strict=True):
                if stop.is_set():
                    return
                np.copyto(blocks[row], source)
                # Of what is in its place now: whatever wrote to the slot meanwhile is found, too.
                if xxhash.xxh3_64_intdigest(blocks[row]) != digest:
                    wrong.append(row)

        await run_to_its_end(self._executor, copy, threading.Event())
        if wrong:
            raise DigestError(f"the digests of {len(wrong)} blocks are wrong")


def _has_no_lane(error: grpc.aio.AioRpcError) -> bool:
    return any(isinstance(value, bytes) and _NO_LANE in value for _, value in error.trailing_metadata() or ())


def _handover_error(error: grpc.aio.AioRpcError) -> HandoverError:
    text = f"WriteKv ended {error.code().name}: {error.details()}"
    return HandoverProtocolError(text) if error.code() is grpc.StatusCode.INVALID_ARGUMENT else SourceGoneError(text)
