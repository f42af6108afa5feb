"""What only `inline` has: bytes on a wire that can be changed, slow, or end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvtransfer.budget import ProgressLimit
from kvtransfer.errors import ChunkError, HoldUnknownError, StalledError
from kvtransfer.inline import InlineLimits, InlineSource
from tandem.v1 import prefill_pb2
from tests.kvtransfer.ends import HOST, open_ends
from tests.support.held import assert_nothing_held

PROMPT = tuple(range(100, 122))


def _flip(message: bytes) -> list[bytes]:
    return [message[:-1] + bytes((message[-1] ^ 1,))]


@pytest.mark.parametrize(("mangle", "checksum"), [(_flip, True), (lambda m: [m[:-3]], False), (lambda m: [m, m], False), (lambda m: [], False)])
async def test_mangled_chunks_fail_the_hand_over(mangle: Callable[[bytes], list[bytes]], checksum: bool) -> None:
    async with open_ends("inline", checksum=checksum) as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, 6), ends.handover(reserved)
        hold.announce(6)
        ends.mangle.append(mangle)
        handover.announce(ends.ready(hold, 0, 6))
        with pytest.raises(ChunkError):
            await handover.covered()
        handover.stop()
        ends.holds.close(hold)
        ends.prefill.release("p")
        ends.decode.release("d")
        await assert_nothing_held(ends.prefill, ends.decode)


async def test_a_flipped_bit_passes_only_when_verification_is_off() -> None:
    async with open_ends("inline", checksum=False) as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(6)
        ends.mangle.append(_flip)
        await ends.reader.read(ends.ready(hold, 0, 6), reserved.block_ids)
        ids = await ends.prefill.acquire("test", "p", 0, 6)
        assert (ends.prefill.kv_cache.blocks[list(ids)] != ends.decode.kv_cache.blocks[list(reserved.block_ids[:6])]).any()


async def test_a_hold_is_bound_to_its_peers_host() -> None:
    async with open_ends("inline") as ends:
        await ends.compute(PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(6)
        assert isinstance(ends.source, InlineSource)
        request = prefill_pb2.ReadKvRequest(hold_id=hold.hold_id, first_block=0, num_blocks=6)
        with pytest.raises(HoldUnknownError) as foreign:
            await ends.source.send(request, "ipv4:192.0.2.1", _never)
        request.hold_id = "f" * 32
        with pytest.raises(HoldUnknownError) as unknown:
            await ends.source.send(request, HOST, _never)
        assert str(foreign.value) == str(unknown.value)
        ends.holds.close(hold)


async def _never(message: bytes) -> None:
    raise AssertionError("nothing may be sent")


async def test_a_sender_that_stalls_is_given_up_and_one_whose_peer_does_not_read_too() -> None:
    async with open_ends("inline") as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(6)
        limits = InlineLimits(new_progress_limit=lambda: ProgressLimit(window_s=0.05, min_bytes=64))
        ends.reader._limits = limits  # type: ignore[attr-defined]
        ends.gate.num_free = 1
        with pytest.raises(StalledError, match=r"bytes in 0\.05 s"):
            await ends.reader.read(ends.ready(hold, 0, 6), reserved.block_ids)
        ends.gate.open()
        source = InlineSource(ends.prefill.kv_cache.blocks, ends.holds, new_limit=limits.new_progress_limit)
        with pytest.raises(StalledError):
            await source.send(prefill_pb2.ReadKvRequest(hold_id=hold.hold_id, first_block=0, num_blocks=6), HOST, lambda _: asyncio.Event().wait())  # type: ignore[arg-type,return-value]
        ends.holds.close(hold)
