"""What every transport promises. Each test runs over each of them (see test_contract.py)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engine.async_engine import AsyncEngine
from engine.sequence import SequenceKind, SequenceSpec
from kvtransfer.copying import Blocks
from kvtransfer.errors import HandoverError, HandoverProtocolError, SourceGoneError
from tests.kvtransfer.ends import SAMPLING, Ends, until
from tests.support.held import assert_nothing_held

PROMPT = tuple(range(100, 122))  # 22 tokens: five full blocks of 4 and a partly used one
NUM_BLOCKS = 6
_OTHER = SequenceSpec("other", (1, 2, 3), SAMPLING, SequenceKind.REMOTE_KV)


async def _give_back(ends: Ends) -> None:
    ends.prefill.release("p")
    ends.decode.release("d")
    await assert_nothing_held(ends.prefill, ends.decode)
    assert ends.prefill_quarantine.reader_ids == ends.decode_quarantine.reader_ids == ()


def _bytes_of(engine: AsyncEngine, block_ids: tuple[int, ...]) -> Blocks:
    return engine.kv_cache.blocks[list(block_ids)]


class TransportContract:
    """The suite; `ends` is a fixture that a subclass's module gives."""

    async def test_right_bytes_arrive_in_the_right_blocks(self, ends: Ends) -> None:
        first = await ends.compute(PROMPT)
        await ends.decode.reserve(_OTHER)  # so that ids differ between the pools
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, NUM_BLOCKS), ends.handover(reserved)
        assert hold.announce(NUM_BLOCKS) == (0, NUM_BLOCKS)
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        assert await handover.covered() == NUM_BLOCKS
        source_ids = await ends.prefill.acquire("test", "p", 0, NUM_BLOCKS)
        ends.prefill.drop("test")
        assert source_ids != reserved.block_ids[:NUM_BLOCKS]
        assert (_bytes_of(ends.prefill, source_ids) == _bytes_of(ends.decode, reserved.block_ids[:NUM_BLOCKS])).all()
        assert hold.num_unread_blocks == 0
        assert (handover.record.num_bytes, handover.record.transport) == (NUM_BLOCKS * 128, ends.transport)
        await ends.decode.commit("d", (first,))
        handover.stop()
        ends.holds.close(hold)
        ends.decode.release("other")
        await _give_back(ends)

    async def test_runs_are_read_while_later_ones_are_not_announced(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, NUM_BLOCKS), ends.handover(reserved)
        for filled, run in ((2, (0, 2)), (2, (2, 0)), (3, (2, 1)), (9, (3, 3))):
            assert hold.announce(filled) == run
            if run[1]:
                handover.announce(ends.ready(hold, *run))
                await until(lambda: handover.record.num_blocks == run[0] + run[1])  # noqa: B023
        assert await handover.covered() == NUM_BLOCKS
        handover.stop()
        ends.holds.close(hold)
        await _give_back(ends)

    async def test_blocks_that_decode_has_are_not_touched(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        before = ends.decode.kv_cache.blocks.copy()
        hold = ends.hold(0, NUM_BLOCKS)
        hold.announce(NUM_BLOCKS)
        await ends.reader.read(ends.ready(hold, 1, 3), reserved.block_ids)
        changed = {int(block) for block in np.flatnonzero((before != ends.decode.kv_cache.blocks).any(axis=1))}
        assert changed == set(reserved.block_ids[1:4])
        assert hold.num_unread_blocks == NUM_BLOCKS - 3
        ends.holds.close(hold)
        await _give_back(ends)

    async def test_cancel_in_the_middle_leaves_no_reader(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, NUM_BLOCKS), ends.handover(reserved)
        hold.announce(NUM_BLOCKS)
        ends.gate.num_free = 0
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        await asyncio.wait_for(ends.gate.reached.wait(), 5)
        handover.stop()
        ends.gate.open()
        with pytest.raises(HandoverError):
            await handover.covered()
        ends.holds.close(hold)
        await _give_back(ends)

    async def test_blocks_cannot_be_reused_while_they_are_read(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, NUM_BLOCKS), ends.handover(reserved)
        hold.announce(NUM_BLOCKS)
        ends.gate.num_free = 0
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        await asyncio.wait_for(ends.gate.reached.wait(), 5)
        ends.prefill.release("p")
        ends.decode.release("d")
        for report in (await ends.prefill.report(), await ends.decode.report()):
            assert report.num_held_blocks == NUM_BLOCKS
            assert report.num_readers == 1
            assert all(owner.startswith("reader:") for owner in report.owners)
        ends.gate.open()
        handover.stop()
        ends.holds.close(hold)
        await _give_back(ends)

    async def test_source_gone_in_the_middle_is_an_error_and_never_covers(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, NUM_BLOCKS), ends.handover(reserved)
        hold.announce(NUM_BLOCKS)
        ends.gate.num_free = 0
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        await asyncio.wait_for(ends.gate.reached.wait(), 5)
        await ends.source_dies()
        with pytest.raises(SourceGoneError):
            await handover.covered()
        handover.stop()
        ends.holds.close(hold)
        await _give_back(ends)

    async def test_closing_the_hold_ends_its_readers(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, NUM_BLOCKS), ends.handover(reserved)
        hold.announce(NUM_BLOCKS)
        ends.gate.num_free = 0
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        await asyncio.wait_for(ends.gate.reached.wait(), 5)
        ends.holds.close(hold)
        ends.gate.open()
        with pytest.raises(SourceGoneError):
            await handover.covered()
        assert hold.num_unread_blocks == NUM_BLOCKS
        handover.stop()
        await _give_back(ends)

    async def test_blocks_not_announced_cannot_be_read(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold = ends.hold(0, NUM_BLOCKS)
        hold.announce(3)
        for run in ((2, 2), (3, 1), (0, 4)):
            with pytest.raises((HandoverProtocolError, SourceGoneError)):
                await ends.reader.read(ends.ready(hold, *run), reserved.block_ids)
        ends.holds.close(hold)
        await _give_back(ends)

    async def test_an_unknown_or_closed_hold_cannot_be_read(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold = ends.hold(0, NUM_BLOCKS)
        hold.announce(NUM_BLOCKS)
        guess = ends.ready(hold, 0, NUM_BLOCKS)
        guess.hold_id = "0" * 32
        with pytest.raises(SourceGoneError):
            await ends.reader.read(guess, reserved.block_ids)
        ends.holds.close(hold)
        with pytest.raises(SourceGoneError):
            await ends.reader.read(ends.ready(hold, 0, NUM_BLOCKS), reserved.block_ids)
        await _give_back(ends)

    async def test_a_sequence_released_before_the_copy_is_not_confirmed_though_its_blocks_are_still_kept(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, NUM_BLOCKS), ends.handover(reserved)
        hold.announce(NUM_BLOCKS)
        ends.prefill.release("p")
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        assert await handover.covered() == NUM_BLOCKS
        assert await ends.prefill.confirm("p", NUM_BLOCKS) is False
        handover.stop()
        ends.holds.close(hold)
        await _give_back(ends)
