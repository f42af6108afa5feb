"""What transports promise: all of them, those that read under prefill's hold, and those that read prefill's pool on their own (see test_contract.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from engine.kv_cache import KvLayout
from engine.sequence import SequenceKind, SequenceSpec
from kvtransfer.budget import ByteBudget
from kvtransfer.errors import DigestError, HandoverError, HandoverProtocolError, NoTransportError, SourceGoneError, StaleBlockError, TransferError
from kvtransfer.handover import Handover
from kvtransfer.hold import Hold
from kvtransfer.memories import Blocks
from kvtransfer.transport import Rows
from tandem.v1 import kv_pb2
from tests.kvtransfer.ends import SAMPLING, Ends, open_ends
from tests.support.held import assert_nothing_held

PROMPT = tuple(range(100, 122))  # 22 tokens: five full blocks of 4 and a partly used one
NUM_BLOCKS = 6
_OTHER = SequenceSpec("other", (1, 2, 3), SAMPLING, SequenceKind.REMOTE_KV)


def tokens_of(blocks: Blocks, layout: KvLayout) -> Blocks:
    """The bytes of consecutive blocks of one layer and one head, as [token, K or V, bytes]."""
    return np.concatenate(list(blocks.reshape(len(blocks), 2, layout.block_size, -1)), axis=1).transpose(1, 0, 2)


async def _gated(ends: Ends, hold: Hold, handover: Handover) -> None:
    """Announces everything and waits until its copy stands at the gate."""
    ends.gate.num_free = 0
    handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
    await asyncio.wait_for(ends.gate.reached.wait(), 5)


async def _begun(ends: Ends) -> tuple[tuple[int, ...], Hold, Handover]:
    """A computed prompt, all of it announced in prefill, and decode's side: the reserved blocks, the hold, the hand-over."""
    await ends.compute(PROMPT)
    reserved = await ends.reserve(PROMPT)
    hold = ends.hold(0, NUM_BLOCKS)
    hold.announce(NUM_BLOCKS)
    return reserved.block_ids[:NUM_BLOCKS], hold, ends.handover(reserved, PROMPT)


async def _give_back(ends: Ends, *handovers: Handover) -> None:
    for handover in handovers:
        handover.stop()
    for hold in ends.holds:
        ends.holds.close(hold)
    for seq_id in ends.block_ids:
        ends.prefill.release(seq_id)
    for seq_id in ("d", "again", "other"):
        ends.decode.release(seq_id)
    await assert_nothing_held(ends.prefill, ends.decode)
    assert ends.prefill_quarantine.reader_ids == ends.decode_quarantine.reader_ids == ()


class TransportContract:
    """What every transport promises. `name` is its kind's; `ends` a fixture with both ends of it."""

    async def test_right_bytes_arrive_in_the_right_blocks(self, ends: Ends) -> None:
        first = await ends.compute(PROMPT)
        await ends.decode.reserve(_OTHER)  # so that ids differ between the pools
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, NUM_BLOCKS), ends.handover(reserved, PROMPT)
        assert hold.announce(NUM_BLOCKS) == (0, NUM_BLOCKS)
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        assert await handover.covered() == NUM_BLOCKS
        assert hold.pool_ids[:NUM_BLOCKS] != reserved.block_ids[:NUM_BLOCKS]
        assert (ends.prefill_bytes(hold.pool_ids[:NUM_BLOCKS]) == ends.decode_bytes(reserved.block_ids[:NUM_BLOCKS])).all()
        assert (handover.record.num_bytes, handover.record.transport) == (NUM_BLOCKS * 128, ends.transport)
        await ends.decode.commit("d", (first,))
        await _give_back(ends, handover)

    async def test_runs_are_read_while_later_ones_are_not_announced(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, NUM_BLOCKS), ends.handover(reserved, PROMPT)
        for filled, run in ((2, (0, 2)), (2, (2, 0)), (3, (2, 1)), (9, (3, 3))):
            assert hold.announce(filled) == run
            if run[1]:
                handover.announce(ends.ready(hold, *run))
                async with asyncio.timeout(5):
                    while handover.record.num_blocks < sum(run):  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
        assert await handover.covered() == NUM_BLOCKS
        await _give_back(ends, handover)

    async def test_other_blocks_are_not_touched(self, ends: Ends) -> None:
        ids, hold, handover = await _begun(ends)
        before = ends.decode_bytes()
        await ends.reader.read(ends.ready(hold, 1, 3), Rows(ends.memory, ids[1:4]))
        changed = {int(block) for block in np.flatnonzero((before != ends.decode_bytes()).any(axis=1))}
        assert changed == set(ids[1:4])
        await _give_back(ends, handover)

    async def test_cancel_in_the_middle_leaves_no_reader(self, ends: Ends) -> None:
        _, hold, handover = await _begun(ends)
        await _gated(ends, hold, handover)
        handover.stop()
        ends.gate.open()
        with pytest.raises(HandoverError):
            await handover.covered()
        await _give_back(ends, handover)

    async def test_blocks_cannot_be_reused_while_they_are_read(self, ends: Ends) -> None:
        _, hold, handover = await _begun(ends)
        await _gated(ends, hold, handover)
        ends.prefill.release("p")
        ends.decode.release("d")
        for report in (await ends.prefill.report(), await ends.decode.report()):
            assert report.num_held_blocks == NUM_BLOCKS
            assert report.num_readers == 1
            assert all(owner.startswith("reader:") for owner in report.owners)
        ends.gate.open()
        await _give_back(ends, handover)

    async def test_source_gone_in_the_middle_is_an_error_and_never_covers(self, ends: Ends) -> None:
        _, hold, handover = await _begun(ends)
        await _gated(ends, hold, handover)
        await ends.source_dies()
        with pytest.raises(TransferError):
            await handover.covered()
        await _give_back(ends, handover)

    async def test_a_sequence_released_before_the_copy_is_not_confirmed_though_its_blocks_are_still_kept(self, ends: Ends) -> None:
        _, hold, handover = await _begun(ends)
        ends.prefill.release("p")
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        assert await handover.covered() == NUM_BLOCKS
        assert await ends.prefill.confirm("p", NUM_BLOCKS) is False
        await _give_back(ends, handover)

    async def test_the_probe_moves_the_right_bytes_and_is_chosen_by_them(self, ends: Ends) -> None:
        paired = await ends.pair()
        chosen = await ends.choose(paired)
        assert chosen.reader is paired.reader
        assert chosen.bytes_per_s > 0
        assert bytes((await paired.reader.probe()).content) == bytes(ends.two.pool.probe)
        paired.reader.close()
        ends.opened.source.withdraw(paired.pairing.pairing_id)

    async def test_a_probe_that_arrives_altered_is_refused(self, ends: Ends) -> None:
        paired = await ends.pair(alter_probe=True)
        with pytest.raises(NoTransportError, match="other bytes"):
            await ends.choose(paired)
        ends.opened.source.withdraw(paired.pairing.pairing_id)

    async def test_a_closed_reader_ends_its_read_and_takes_no_new_one(self, ends: Ends) -> None:
        ids, hold, handover = await _begun(ends)
        ready = ends.ready(hold, 0, NUM_BLOCKS)
        await _gated(ends, hold, handover)
        ends.reader.close()
        with pytest.raises(HandoverError):
            await ends.reader.read(ready, Rows(ends.memory, ids))
        ends.gate.open()
        assert await handover.covered() == NUM_BLOCKS
        assert (ends.prefill_bytes(hold.pool_ids[:NUM_BLOCKS]) == ends.decode_bytes(ids)).all()
        with pytest.raises(HandoverError):
            await ends.reader.read(ready, Rows(ends.memory, ids))
        with pytest.raises(HandoverError):
            await ends.reader.probe()
        await _give_back(ends, handover)

    async def test_closing_twice_is_closing_once_before_and_after_attaching(self, ends: Ends) -> None:
        never_attached = await ends.pair()
        for reader in (never_attached.reader, ends.reader):
            reader.close()
            reader.close()
        for pairing in (never_attached.pairing, never_attached.pairing, ends.paired.pairing):
            ends.opened.source.withdraw(pairing.pairing_id)
        ends.opened.source.withdraw("unknown")

    async def test_another_pairing_goes_on_when_one_is_withdrawn(self, ends: Ends) -> None:
        other = await ends.pair()
        await ends.choose(other)
        other.reader.close()
        ends.opened.source.withdraw(other.pairing.pairing_id)
        ids, hold, handover = await _begun(ends)
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        assert await handover.covered() == NUM_BLOCKS
        assert (ends.prefill_bytes(hold.pool_ids[:NUM_BLOCKS]) == ends.decode_bytes(ids)).all()
        await _give_back(ends, handover)

    async def test_a_run_larger_than_a_segment_arrives_within_the_budgets(self, name: str) -> None:
        budgets = (ByteBudget(256), ByteBudget(512))
        async with open_ends(name, budgets=budgets) as ends:
            ids, hold, handover = await _begun(ends)
            handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
            assert await handover.covered() == NUM_BLOCKS
            assert (ends.prefill_bytes(hold.pool_ids[:NUM_BLOCKS]) == ends.decode_bytes(ids)).all()
            assert [budget.num_free_bytes for budget in budgets] == [256, 512]
            await _give_back(ends, handover)

    async def test_digests_that_are_asked_for_are_verified(self, name: str) -> None:
        async with open_ends(name, checksum=True) as ends:
            ids, hold, handover = await _begun(ends)
            handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
            assert await handover.covered() == NUM_BLOCKS
            assert (ends.prefill_bytes(hold.pool_ids[:NUM_BLOCKS]) == ends.decode_bytes(ids)).all()
            await _give_back(ends, handover)

    @pytest.mark.parametrize("fault", ["none", "one missing", "one wrong", "two swapped"])
    async def test_a_missing_or_wrong_digest_is_an_error_and_never_covers(self, name: str, fault: str) -> None:
        async with open_ends(name, checksum=True) as ends:
            _, hold, handover = await _begun(ends)
            ready = ends.ready(hold, 0, NUM_BLOCKS)
            digests = list(ready.digests)
            digests = {
                "none": [],
                "one missing": digests[:-1],
                "one wrong": [*digests[:-1], digests[-1] ^ 1],
                "two swapped": [digests[1], digests[0], *digests[2:]],
            }[fault]
            ready.ClearField("digests")
            ready.digests.extend(digests)
            handover.announce(ready)
            with pytest.raises(DigestError):
                await handover.covered()
            await _give_back(ends, handover)

    @pytest.mark.parametrize("block_sizes", [(4, 8), (8, 4), (4, 6)])
    async def test_blocks_of_another_size_are_converted(self, name: str, block_sizes: tuple[int, int]) -> None:
        async with open_ends(name, block_sizes=block_sizes, checksum=True, budgets=(ByteBudget(512), ByteBudget(512))) as ends:
            await ends.compute(PROMPT)
            reserved = await ends.reserve(PROMPT)
            num_blocks = -(-len(PROMPT) // block_sizes[0])
            hold, handover = ends.hold(0, num_blocks), ends.handover(reserved, PROMPT)
            hold.announce(num_blocks)
            handover.announce(ends.ready(hold, 0, num_blocks))
            assert await handover.covered() == num_blocks
            own = ends.decode_bytes(reserved.block_ids[: -(-len(PROMPT) // block_sizes[1])])
            theirs = tokens_of(ends.prefill_bytes(hold.pool_ids[:num_blocks]), ends.prefill.model.layout)[: len(PROMPT)]
            assert (tokens_of(own, ends.decode.model.layout)[: len(PROMPT)] == theirs).all()
            await _give_back(ends, handover)


class HeldReadContract:
    """What those promise whose reads prefill takes part in: its hold is asked each time."""

    async def test_all_announced_blocks_are_known_to_be_read(self, ends: Ends) -> None:
        ids, hold, handover = await _begun(ends)
        await ends.reader.read(ends.ready(hold, 1, 3), Rows(ends.memory, ids[1:4]))
        assert hold.num_unread_blocks == NUM_BLOCKS - 3
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        await handover.covered()
        assert hold.num_unread_blocks == 0
        await _give_back(ends, handover)

    async def test_closing_the_hold_ends_its_readers(self, ends: Ends) -> None:
        _, hold, handover = await _begun(ends)
        await _gated(ends, hold, handover)
        ends.holds.close(hold)
        ends.gate.open()
        with pytest.raises(SourceGoneError):
            await handover.covered()
        assert hold.num_unread_blocks == NUM_BLOCKS
        await _give_back(ends, handover)

    async def test_blocks_not_announced_cannot_be_read(self, ends: Ends) -> None:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold = ends.hold(0, NUM_BLOCKS)
        hold.announce(3)
        for first, count in ((2, 2), (3, 1), (0, 4)):
            with pytest.raises((HandoverProtocolError, SourceGoneError)):
                await ends.reader.read(ends.ready(hold, first, count), Rows(ends.memory, reserved.block_ids[first : first + count]))
        await _give_back(ends)

    async def test_an_unknown_a_closed_and_another_pairings_hold_cannot_be_read(self, ends: Ends) -> None:
        ids, hold, handover = await _begun(ends)
        before = ends.decode_bytes()
        foreign = ends.holds.open("of-p", "another pairing", 0, NUM_BLOCKS)
        foreign.allocated(hold.pool_ids)
        foreign.announce(NUM_BLOCKS)
        ready = ends.ready(hold, 0, NUM_BLOCKS)
        for hold_id in ("0" * 32, foreign.hold_id):
            ready.hold_id = hold_id
            with pytest.raises(SourceGoneError):
                await ends.reader.read(ready, Rows(ends.memory, ids))
        ends.holds.close(hold)
        ready.hold_id = hold.hold_id
        with pytest.raises(SourceGoneError):
            await ends.reader.read(ready, Rows(ends.memory, ids))
        assert (before == ends.decode_bytes()).all()
        await _give_back(ends, handover)


class OneSidedContract:
    """What those promise that read prefill's pool without asking it: the generation of each block is looked at before and after the copy."""

    async def test_a_generation_that_is_not_the_pools_is_stale_and_never_covers(self, ends: Ends) -> None:
        _, hold, handover = await _begun(ends)
        ready = ends.ready(hold, 0, NUM_BLOCKS)
        ready.generations[3] = (ready.generations[3] + 2) & 0xFFFFFFFF
        handover.announce(ready)
        with pytest.raises(StaleBlockError):
            await handover.covered()
        await _give_back(ends, handover)

    @pytest.mark.parametrize("step", [1, 2])
    async def test_a_block_that_is_given_away_while_it_is_copied_is_stale_and_never_covers(self, ends: Ends, step: int) -> None:
        _, hold, handover = await _begun(ends)
        generations, block = ends.prefill.kv_cache.generations, hold.pool_ids[NUM_BLOCKS - 1]
        before = generations[block]
        called = 0

        def give_away() -> None:
            nonlocal called
            called += 1
            generations[block] = before + step

        ends.gate.in_the_middle = give_away
        handover.announce(ends.ready(hold, 0, NUM_BLOCKS))
        with pytest.raises(StaleBlockError):
            await handover.covered()
        assert called, "the kind never called Gate.middle"
        generations[block] = before
        await _give_back(ends, handover)

    async def test_released_blocks_and_those_in_use_again_are_stale(self, name: str) -> None:
        async with open_ends(name, num_blocks=8) as ends:
            ids, hold, handover = await _begun(ends)
            ready = ends.ready(hold, 0, NUM_BLOCKS)
            ends.holds.close(hold)
            ends.prefill.release("p")
            await ends.prefill.report()  # behind the release
            with pytest.raises(StaleBlockError):
                await ends.reader.read(ready, Rows(ends.memory, ids))
            await ends.compute(tuple(range(300, 322)), "q")
            again = [index for index, block in enumerate(ready.block_ids) if block in ends.block_ids["q"]]
            assert again
            for index in again:  # odd as before, and yet another one
                assert ends.prefill.kv_cache.generations[ready.block_ids[index]] == ready.generations[index] + 2
                with pytest.raises(StaleBlockError):
                    await ends.reader.read(_one(ready, index), Rows(ends.memory, ids[:1]))
            ends.prefill.release("q")
            ends.prefill.drop("of-q")
            await _give_back(ends, handover)

    @pytest.mark.parametrize("fault", ["an id less", "an id more", "no ids", "a generation less", "no generations", "beyond the pool", "even"])
    async def test_ids_and_generations_that_do_not_fit_are_protocol_errors(self, ends: Ends, fault: str) -> None:
        ids, hold, handover = await _begun(ends)
        before = ends.decode_bytes()
        ready = ends.ready(hold, 0, NUM_BLOCKS)
        change = _FAULTS[fault]
        block_ids, generations = change(list(ready.block_ids), list(ready.generations))
        ready.ClearField("block_ids")
        ready.ClearField("generations")
        ready.block_ids.extend(block_ids)
        ready.generations.extend(generations)
        with pytest.raises(HandoverProtocolError):
            await ends.reader.read(ready, Rows(ends.memory, ids))
        handover.announce(ready)
        with pytest.raises(HandoverProtocolError):
            await handover.covered()
        assert (before == ends.decode_bytes()).all()
        await _give_back(ends, handover)


_FAULTS: dict[str, Callable[[list[int], list[int]], tuple[Sequence[int], Sequence[int]]]] = {
    "an id less": lambda ids, generations: (ids[:-1], generations),
    "an id more": lambda ids, generations: ([*ids, ids[0]], generations),
    "no ids": lambda ids, generations: ((), generations),
    "a generation less": lambda ids, generations: (ids, generations[:-1]),
    "no generations": lambda ids, generations: (ids, ()),
    "beyond the pool": lambda ids, generations: ([*ids[:-1], 64], generations),
    "even": lambda ids, generations: (ids, [*generations[:-1], generations[-1] + 1]),
}


def _one(ready: kv_pb2.KvReady, index: int) -> kv_pb2.KvReady:
    """One block of a run."""
    return kv_pb2.KvReady(
        hold_id=ready.hold_id,
        first_block=ready.first_block + index,
        num_blocks=1,
        block_ids=ready.block_ids[index : index + 1],
        generations=ready.generations[index : index + 1],
    )
