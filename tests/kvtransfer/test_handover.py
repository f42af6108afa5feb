"""A hand-over covers a prompt exactly once or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvtransfer.errors import HandoverError, HandoverProtocolError, NoTransportError
from kvtransfer.handover import Handover
from kvtransfer.hold import Hold
from kvtransfer.memory import MemorySource
from kvtransfer.pairing import Pairing
from kvtransfer.path import block_range
from tandem.v1 import kv_pb2, prefill_pb2
from tests.kvtransfer.ends import Ends, open_ends, until
from tests.support.held import assert_nothing_held

PROMPT = tuple(range(100, 122))

Announcements = Callable[[Ends, Hold], list[kv_pb2.KvReady]]
FAULTS: dict[str, Announcements] = {
    "out of order": lambda e, h: [e.ready(h, 2, 2)],
    "twice": lambda e, h: [e.ready(h, 0, 2), e.ready(h, 0, 2)],
    "overlapping": lambda e, h: [e.ready(h, 0, 2), e.ready(h, 1, 2)],
    "a gap": lambda e, h: [e.ready(h, 0, 2), e.ready(h, 3, 1)],
    "beyond the end": lambda e, h: [e.ready(h, 0, 7)],
    "empty": lambda e, h: [e.ready(h, 0, 0)],
    "another hold": lambda e, h: [e.ready(h, 0, 2), e.ready(e.hold(0, 6), 2, 2)],
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_announcements_that_are_not_due_are_protocol_errors(fault: str) -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, 6), ends.handover(reserved, PROMPT)
        hold.announce(6)
        *due, faulty = FAULTS[fault](ends, hold)
        for ready in due:
            handover.announce(ready)
        with pytest.raises(HandoverProtocolError):
            handover.announce(faulty)
        handover.stop()
        for each in ends.holds:
            ends.holds.close(each)
        ends.prefill.release("p")
        ends.decode.release("d")
        await assert_nothing_held(ends.prefill, ends.decode)


async def test_blocks_that_were_never_announced_do_not_cover() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        handover = ends.handover(await ends.reserve(PROMPT), PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(5)
        handover.announce(ends.ready(hold, 0, 5))
        with pytest.raises(HandoverProtocolError, match="5 of 6"):
            await handover.covered()
        handover.stop()


async def test_a_prompt_that_decode_has_whole_is_covered_at_once() -> None:
    async with open_ends("memory") as ends:
        prompt = PROMPT[:20]
        first = await ends.compute(prompt)
        reserved = await ends.reserve(prompt)
        hold, handover = ends.hold(0, 5), ends.handover(reserved, prompt)
        hold.announce(5)
        handover.announce(ends.ready(hold, 0, 5))
        await handover.covered()
        await ends.decode.commit("d", (first,))
        again = await ends.reserve(prompt, "again")
        assert again.num_cached_blocks == again.num_prompt_blocks == 5
        empty = ends.handover(again, prompt, "again")
        assert await empty.covered() == 0
        with pytest.raises(HandoverProtocolError):
            empty.announce(ends.ready(hold, 0, 1))
        empty.stop()


async def test_a_read_that_fails_ends_the_step_that_was_waited_for() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        handover = ends.handover(await ends.reserve(PROMPT), PROMPT)
        cancelled = asyncio.Event()

        async def step() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        hold = ends.hold(0, 6)
        handover.announce(ends.ready(hold, 0, 6))  # prefill's side never announced it
        with pytest.raises(HandoverError):
            await handover.guard(step())
        await asyncio.wait_for(cancelled.wait(), 5)
        handover.stop()


async def _failed(ends: Ends) -> Handover:
    """One whose reading has failed: prefill's side never announced what it was told of."""
    handover = ends.handover(await ends.reserve(PROMPT), PROMPT)
    handover.announce(ends.ready(ends.hold(0, 6), 0, 6))
    await handover.stopped()
    return handover


async def test_a_step_behind_a_read_that_has_failed_is_not_waited_for() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        handover = await _failed(ends)
        with pytest.raises(HandoverError):
            await asyncio.wait_for(handover.guard(asyncio.Event().wait()), 5)
        handover.stop()


async def test_a_step_that_has_failed_too_says_why() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        handover, step = ends.handover(reserved, PROMPT), asyncio.get_running_loop().create_future()
        guarding = asyncio.ensure_future(handover.guard(step))
        handover._task.add_done_callback(lambda _: step.set_exception(LookupError("the status")))
        handover.announce(ends.ready(ends.hold(0, 6), 0, 6))
        with pytest.raises(LookupError):
            await guarding
        handover.stop()


async def test_a_reservation_that_is_gone_fails_the_hand_over() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        ends.decode.release("d")
        handover = ends.handover(reserved, PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(6)
        handover.announce(ends.ready(hold, 0, 6))
        with pytest.raises(HandoverError, match="reading failed"):
            await handover.covered()
        handover.stop()


async def test_a_reader_that_does_not_end_is_named_alarmed_and_keeps_its_blocks(caplog: pytest.LogCaptureFixture) -> None:
    async with open_ends("memory", max_stop_s=0.02) as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, 6), ends.handover(reserved, PROMPT)
        hold.announce(6)
        ends.gate.num_free = 0
        handover.announce(ends.ready(hold, 0, 6))
        await asyncio.wait_for(ends.gate.reached.wait(), 5)
        handover.stop()
        stopped = asyncio.ensure_future(handover.stopped())
        ends.decode.release("d")
        (name,) = ends.decode_quarantine.reader_ids
        await until(lambda: "has not ended" in caplog.text)
        assert name in caplog.text
        report = await ends.decode.report()
        assert report.owners == {f"reader:{name}": 6}
        assert not stopped.done()
        ends.gate.open()
        await asyncio.wait_for(stopped, 5)
        ends.holds.close(hold)
        ends.prefill.release("p")
        await assert_nothing_held(ends.prefill, ends.decode)
        assert ends.decode_quarantine.reader_ids == ()


async def test_memory_is_offered_only_within_the_process_and_not_once_the_pool_is_gone() -> None:
    async with open_ends("memory") as ends:
        source = ends.opened.source
        with pytest.raises(NoTransportError, match="another process"):
            await source.offer(Pairing(prefill_pb2.PairStart(process_id="elsewhere")))
        paired = await ends.pair()
        assert isinstance(source, MemorySource)
        source.close()
        with pytest.raises(NoTransportError, match="gone"):
            await ends.choose(paired)


async def test_what_was_read_before_the_prompt_was_computed_is_hidden() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        handover = ends.handover(await ends.reserve(PROMPT), PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(6)
        handover.computed()
        assert handover.record.hidden_ns == 0
        handover.announce(ends.ready(hold, 0, 2))
        await until(lambda: handover.record.num_blocks == 2)
        handover.computed()
        hidden_ns = handover.record.hidden_ns
        assert hidden_ns == handover.record.wire_ns > 0
        ends.gate.num_free = 0
        handover.announce(ends.ready(hold, 2, 4))
        await asyncio.wait_for(ends.gate.reached.wait(), 5)
        handover.computed()
        partly_ns = handover.record.hidden_ns
        assert partly_ns > hidden_ns
        ends.gate.open()
        await handover.covered()
        assert hidden_ns < partly_ns == handover.record.hidden_ns < handover.record.wire_ns
        handover.stop()
        ends.holds.close(hold)


@pytest.mark.parametrize("block_sizes", [(4, 4), (8, 4), (4, 8)])
async def test_only_what_decode_lacks_is_read_and_what_it_has_stays_as_it_is(block_sizes: tuple[int, int]) -> None:
    async with open_ends("memory", block_sizes=block_sizes) as ends:
        source_size, own_size = block_sizes
        first = await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, -(-22 // source_size)), ends.handover(reserved, PROMPT)
        hold.announce(9)
        handover.announce(ends.ready(hold, 0, handover.num_blocks))
        await handover.covered()
        await ends.decode.commit("d", (first,))
        handover.stop()
        ends.decode.release("d")
        longer = PROMPT[:20] + (7,) * 9
        await ends.compute(longer, "q")
        again = await ends.reserve(longer, "again")
        to = ends.destination(again, longer, "again")
        assert to.num_cached_tokens == 20 // own_size * own_size
        later = ends.handover(again, longer, "again")
        first_block, end_block = block_range(to.num_cached_tokens, len(longer), source_size)
        other = ends.hold(first_block, end_block - first_block, "q")
        other.announce(99)
        later.announce(ends.ready(other, first_block, end_block - first_block))
        before = ends.decode_bytes(again.block_ids[: again.num_cached_blocks])
        ends.prefill.kv_cache.blocks[list(other.pool_ids[first_block : to.num_cached_tokens // source_size + 1])] ^= (
            0xFF  # also what decode has: it must not arrive
        )
        await later.covered()
        assert (before == ends.decode_bytes(again.block_ids[: again.num_cached_blocks])).all()
        assert later.record.num_blocks == end_block - first_block
        later.stop()
        for each in ends.holds:
            ends.holds.close(each)
        for seq_id in ("p", "q"):
            ends.prefill.release(seq_id)
        ends.decode.release("again")
        await assert_nothing_held(ends.prefill, ends.decode)


async def test_a_hand_over_that_waits_behind_anothers_copy_is_cancelled_at_once() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        hold = ends.hold(0, 6)
        hold.announce(6)
        reserved = await ends.reserve(PROMPT)
        other = await ends.reserve(PROMPT, "other")
        running, waiting = ends.handover(reserved, PROMPT), ends.handover(other, PROMPT, "other")
        ends.gate.num_free = 0
        running.announce(ends.ready(hold, 0, 6))
        await asyncio.wait_for(ends.gate.reached.wait(), 5)
        waiting.announce(ends.ready(hold, 0, 6))
        await until(lambda: len(hold._stops) == 2)
        before = ends.decode_bytes(other.block_ids)
        waiting.stop()
        await asyncio.wait_for(waiting.stopped(), 5)
        assert not ends.gate.opened
        ends.gate.open()
        assert await running.covered() == 6
        assert (before == ends.decode_bytes(other.block_ids)).all()
        running.stop()
        ends.holds.close(hold)
        ends.prefill.release("p")
        for seq_id in ("d", "other"):
            ends.decode.release(seq_id)
        await assert_nothing_held(ends.prefill, ends.decode)
