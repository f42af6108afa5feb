"""Faults in the stream of bytes that prefill sends by the inline transport."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

from checks.handover_faults_kinds import IN_STREAM, Kind
from checks.handover_faults_line import Line, put_around
from kvtransfer import chunks
from kvtransfer.inline import InlineSource
from tandem.v1 import prefill_pb2

Write = Callable[[bytes], Awaitable[None]]
CHUNK_BYTES = 4096
"""Small enough that a run of two tiny blocks has more than one."""


def install(line: Line) -> None:
    """Around InlineSource.send, of every instance; chunks of blocks become small ones."""

    def with_faults(send: Any) -> Any:
        async def faulty(source: InlineSource, request: prefill_pb2.ReadKvRequest, write: Write) -> None:
            source._chunk_bytes = CHUNK_BYTES if request.hold_id else chunks.MAX_CHUNK_BYTES
            order = line.take(IN_STREAM, request.first_block) if request.hold_id else None
            if order is None:
                await send(source, request, write)
                return
            messages: list[bytes] = []

            async def keep(message: bytes) -> None:
                messages.append(message)

            await send(source, request, keep)
            if len(messages) < 2:
                line.put_back(order)
            else:
                messages = _mangled(order.kind, random.Random(order.seed), messages)
                line.injected(order)
            for message in messages:
                await write(message)

        return faulty

    put_around(InlineSource, "send", with_faults)


def _mangled(kind: Kind, place: random.Random, messages: list[bytes]) -> list[bytes]:
    if kind is Kind.CUT_STREAM:
        return messages[: place.randrange(len(messages))]
    one, other = sorted(place.sample(range(len(messages)), 2))
    mangled = list(messages)
    if kind is Kind.REORDERED_CHUNKS:
        mangled[one], mangled[other] = messages[other], messages[one]
    else:
        mangled[one] = _shortened(messages[one], place)
    return mangled


def _shortened(message: bytes, place: random.Random) -> bytes:
    """The chunk with fewer bytes, well formed, whole numbers: what is shifted by less has no finite logits, and no token at all."""
    start, (first_block, num_blocks, offset, length, flags) = chunks._unpack(message)
    payload = memoryview(message)[start : start + 4 * place.randrange(1, length // 4)]
    return chunks.pack_chunk(first_block, num_blocks, offset, [payload], last=bool(flags))
