"""What only `inline` has: bytes on a wire that can be changed, slow, or end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvtransfer.budget import ProgressLimit
from kvtransfer.errors import ChunkError, DigestError, HandoverError, HandoverProtocolError, HoldUnknownError, SourceGoneError, StalledError
from kvtransfer.inline import InlineReader, InlineSource
from kvtransfer.transport import Rows
from tandem.v1 import prefill_pb2
from tests.kvtransfer.ends import open_ends
from tests.support.held import assert_nothing_held

PROMPT = tuple(range(100, 122))


def _flip(message: bytes) -> list[bytes]:
    return [message[:-1] + bytes((message[-1] ^ 1,))]


_MANGLED: dict[str, tuple[Callable[[bytes], list[bytes]], bool, type[HandoverError]]] = {
    "a flipped bit": (_flip, True, DigestError),
    "truncated": (lambda m: [m[:-3]], False, ChunkError),
    "doubled": (lambda m: [m, m], False, ChunkError),
    "lost": (lambda m: [], False, ChunkError),
}


@pytest.mark.parametrize("fault", _MANGLED)
async def test_mangled_chunks_fail_the_hand_over(fault: str) -> None:
    mangle, checksum, error = _MANGLED[fault]
    async with open_ends("inline", checksum=checksum) as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, 6), ends.handover(reserved, PROMPT)
        hold.announce(6)
        ends.mangle.append(mangle)
        handover.announce(ends.ready(hold, 0, 6))
        with pytest.raises(error):
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
        hold, handover = ends.hold(0, 6), ends.handover(reserved, PROMPT)
        hold.announce(6)
        ends.mangle.append(_flip)
        handover.announce(ends.ready(hold, 0, 6))
        assert await handover.covered() == 6
        assert (ends.prefill_bytes(hold.pool_ids[:6]) != ends.decode_bytes(reserved.block_ids[:6])).any()
        handover.stop()
        ends.holds.close(hold)


async def test_a_hold_is_read_under_its_own_pairing_only_and_the_refusal_tells_nothing() -> None:
    async with open_ends("inline") as ends:
        await ends.compute(PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(6)
        assert isinstance(ends.opened.source, InlineSource)
        own = ends.paired.pairing.pairing_id
        texts = set()
        for pairing_id, hold_id in (("another", hold.hold_id), ("", hold.hold_id), (own, "f" * 32)):
            request = prefill_pb2.ReadKvRequest(pairing_id=pairing_id, hold_id=hold_id, first_block=0, num_blocks=6)
            with pytest.raises(HoldUnknownError) as refused:
                await ends.opened.source.send(request, _never)
            texts.add(str(refused.value))
        assert len(texts) == 1
        ends.holds.close(hold)


async def test_no_hold_with_blocks_and_a_hold_without_are_not_taken_for_the_probe() -> None:
    async with open_ends("inline") as ends:
        await ends.compute(PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(6)
        assert isinstance(ends.opened.source, InlineSource)
        own = ends.paired.pairing.pairing_id
        with pytest.raises(HoldUnknownError):
            await ends.opened.source.send(prefill_pb2.ReadKvRequest(pairing_id=own, num_blocks=1), _never)
        with pytest.raises(HandoverProtocolError):
            await ends.opened.source.send(prefill_pb2.ReadKvRequest(pairing_id=own, hold_id=hold.hold_id), _never)
        ends.holds.close(hold)


async def _never(message: bytes) -> None:
    raise AssertionError("nothing may be sent")


async def test_a_probe_is_what_its_offer_says_to_the_last_byte() -> None:
    async with open_ends("inline") as ends:
        paired = await ends.pair()
        paired.offer.probe_bytes -= 1
        await paired.reader.attach(paired.offer, paired.offer.sources[0])
        with pytest.raises(ChunkError):
            await paired.reader.probe()


async def test_a_sender_that_stalls_is_given_up_and_one_whose_peer_does_not_read_too() -> None:
    async with open_ends("inline") as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(6)
        reader = ends.reader
        assert isinstance(reader, InlineReader)
        reader._new_limit = lambda: ProgressLimit(window_s=0.05, min_bytes=64)
        ends.gate.num_free = 1
        with pytest.raises(StalledError, match=r"bytes in 0\.05 s"):
            await reader.read(ends.ready(hold, 0, 6), Rows(ends.memory, reserved.block_ids[:6]))
        ends.gate.open()
        source = InlineSource(ends.two.pool, ends.holds, new_limit=lambda: ProgressLimit(window_s=0.05, min_bytes=64))
        request = prefill_pb2.ReadKvRequest(pairing_id=ends.paired.pairing.pairing_id, hold_id=hold.hold_id, first_block=0, num_blocks=6)
        with pytest.raises(StalledError):
            await source.send(request, _hang)
        ends.holds.close(hold)


async def _hang(message: bytes) -> None:
    await asyncio.Event().wait()


async def test_a_cancel_of_the_senders_own_task_is_not_taken_for_a_closed_hold() -> None:
    async with open_ends("inline") as ends:
        await ends.compute(PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(6)
        assert isinstance(ends.opened.source, InlineSource)
        request = prefill_pb2.ReadKvRequest(pairing_id=ends.paired.pairing.pairing_id, hold_id=hold.hold_id, first_block=0, num_blocks=6)
        for close, error in ((True, SourceGoneError), (False, asyncio.CancelledError)):
            began = asyncio.Event()

            async def write(message: bytes, began: asyncio.Event = began) -> None:
                began.set()
                await asyncio.Event().wait()

            sending = asyncio.ensure_future(ends.opened.source.send(request, write))
            await asyncio.wait_for(began.wait(), 5)
            if close:
                ends.holds.close(hold)
                hold = ends.hold(0, 6)
                hold.announce(6)
                request.hold_id = hold.hold_id
            else:
                sending.cancel()
            with pytest.raises(error):
                await sending
        ends.holds.close(hold)
        ends.prefill.release("p")
        await assert_nothing_held(ends.prefill)
