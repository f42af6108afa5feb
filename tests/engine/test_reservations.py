"""Both ends of a hand-over in the engine: holds, reservations, readers, confirm and commit."""

from __future__ import annotations

import contextlib

import pytest

from engine import calls
from engine.errors import CapacityError, HoldBrokenError
from engine.events import Event, Finished, Preempted, Scheduled, Tokens
from engine.limits import EngineLimits
from engine.sampling_params import SampledToken, SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from tests.support.engines import FAKE_EOS, FakeParts, fake_parts, run_alone, token_ids
from tests.support.stepping import a_spec, assert_engine_empty, drain, expected, release_all


def prefill(parts: FakeParts, prompt: list[int] | range, max_tokens: int = 6) -> tuple[SequenceSpec, SampledToken]:
    spec = a_spec(prompt, max_tokens, SequenceKind.PREFILL_ONLY)
    parts.engine.handle(calls.Submit(spec))
    [first] = [token for event in drain(parts)[spec.seq_id] if isinstance(event, Tokens) for token in event.tokens]
    return spec, first


def hand_over(prompt: list[int] | range, prefill_parts: FakeParts, decode_parts: FakeParts, max_tokens: int = 6) -> list[int]:
    """Moves one prompt from one engine to another by hand and decodes it."""
    spec, first = prefill(prefill_parts, prompt, max_tokens)
    target = a_spec(prompt, max_tokens, SequenceKind.REMOTE_KV)
    reserved = decode_parts.engine.handle(calls.Reserve(target))
    assert isinstance(reserved, calls.ReservedBlocks)
    num_left = reserved.num_prompt_blocks - reserved.num_cached_blocks
    if num_left:
        source = prefill_parts.engine.handle(calls.Acquire("r", spec.seq_id, reserved.num_cached_blocks, num_left))
        blocks = decode_parts.engine.handle(calls.Acquire("r", target.seq_id, reserved.num_cached_blocks, num_left))
        decode_parts.kv_cache.blocks[list(blocks)] = prefill_parts.kv_cache.blocks[list(source)]  # type: ignore[call-overload]
    assert prefill_parts.engine.handle(calls.Confirm(spec.seq_id, reserved.num_prompt_blocks)) is True
    decode_parts.engine.handle(calls.Commit(target.seq_id, (first,)))
    for parts, seq_id in ((prefill_parts, spec.seq_id), (decode_parts, "")):
        parts.engine.handle(calls.Drop("r"))
        parts.engine.handle(calls.Release(seq_id, 0))
    return [first.token_id, *token_ids(drain(decode_parts).get(target.seq_id, []))]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 21])
def test_a_hand_over_gives_the_tokens_of_one_engine(length: int) -> None:
    prefill_parts, decode_parts = fake_parts(), fake_parts()
    for _ in range(2):  # the second time with everything cached on both sides
        assert hand_over(range(length), prefill_parts, decode_parts) == expected(range(length))
    assert_engine_empty(prefill_parts)
    assert_engine_empty(decode_parts)
    assert decode_parts.engine.report().computed_prompt_tokens == 0


def test_decode_hits_its_own_prefix_of_a_handed_over_prompt() -> None:
    prefill_parts, decode_parts = fake_parts(), fake_parts()
    hand_over(range(9), prefill_parts, decode_parts)
    reserved = decode_parts.engine.handle(calls.Reserve(a_spec([*range(8), 77], kind=SequenceKind.REMOTE_KV)))
    assert isinstance(reserved, calls.ReservedBlocks)
    assert reserved.num_cached_blocks == 2
    assert reserved.num_prompt_blocks == 3
    release_all(prefill_parts, decode_parts)


def test_a_reservation_is_not_scheduled_and_its_blocks_are_no_hits() -> None:
    parts = fake_parts()
    parts.engine.handle(calls.Reserve(a_spec(range(8), kind=SequenceKind.REMOTE_KV)))
    assert parts.engine.step() is False
    again = parts.engine.handle(calls.Reserve(a_spec(range(8), kind=SequenceKind.REMOTE_KV)))
    assert isinstance(again, calls.ReservedBlocks)
    assert again.num_cached_blocks == 0
    release_all(parts)


def test_a_reader_outlives_the_sequence_and_keeps_its_blocks_from_others() -> None:
    parts = fake_parts(num_blocks=4, max_model_len=16)
    target = a_spec(range(8), 1, SequenceKind.REMOTE_KV)
    parts.engine.handle(calls.Reserve(target))
    blocks = parts.engine.handle(calls.Acquire("slow", target.seq_id, 0, 2))
    parts.engine.handle(calls.Release(target.seq_id, 0))
    assert parts.engine.report().owners == {"reader:slow": 2}
    assert not set(blocks) & set(parts.engine.pool.allocate("sequence:x", 2))  # type: ignore[call-overload]
    parts.engine.pool.release("sequence:x")
    parts.engine.handle(calls.Drop("slow"))
    parts.engine.handle(calls.Drop("slow"))
    assert_engine_empty(parts)


def test_a_prefill_only_sequences_own_reader_has_its_references_from_the_allocation_on() -> None:
    parts = fake_parts()
    spec = a_spec(range(12), kind=SequenceKind.PREFILL_ONLY, reader_id="own")
    parts.engine.handle(calls.Submit(spec))
    assert parts.engine.report().num_readers == 0
    parts.engine.step()
    report = parts.engine.report()
    assert report.owners == {f"sequence:{spec.seq_id}": 3, "reader:own": 3}
    [(_, scheduled), *_] = parts.engine.take_events()
    assert isinstance(scheduled, Scheduled)
    assert scheduled.block_ids == parts.engine.pool.blocks_of("reader:own")
    parts.engine.handle(calls.Release(spec.seq_id, 0))
    assert parts.engine.report().owners == {"reader:own": 3}
    parts.engine.handle(calls.Drop("own"))
    assert_engine_empty(parts)


def test_readers_are_refused_where_nothing_may_be_read_or_written() -> None:
    parts = fake_parts()
    spec = a_spec(range(12), kind=SequenceKind.PREFILL_ONLY)
    parts.engine.handle(calls.Submit(spec))
    parts.engine.step()  # 8 of 12 tokens: two blocks are filled
    parts.engine.handle(calls.Acquire("ok", spec.seq_id, 0, 2))
    for first, count in ((2, 1), (0, 3), (-1, 1), (0, 0), (0, 9)):
        with pytest.raises(HoldBrokenError):
            parts.engine.handle(calls.Acquire("no", spec.seq_id, first, count))
    with pytest.raises(HoldBrokenError, match="gone"):
        parts.engine.handle(calls.Acquire("no", "nobody", 0, 1))
    release_all(parts)


def test_a_writer_is_refused_in_a_shared_block_and_after_the_commit() -> None:
    prefill_parts, decode_parts = fake_parts(), fake_parts()
    hand_over(range(9), prefill_parts, decode_parts)
    target = a_spec(range(9), kind=SequenceKind.REMOTE_KV)
    decode_parts.engine.handle(calls.Reserve(target))
    with pytest.raises(HoldBrokenError):
        decode_parts.engine.handle(calls.Acquire("w", target.seq_id, 1, 2))
    decode_parts.engine.handle(calls.Commit(target.seq_id, (SampledToken(3),)))
    with pytest.raises(HoldBrokenError):
        decode_parts.engine.handle(calls.Acquire("w", target.seq_id, 2, 1))
    with pytest.raises(HoldBrokenError):
        decode_parts.engine.handle(calls.Commit(target.seq_id, (SampledToken(3),)))
    release_all(prefill_parts, decode_parts)


def test_confirm_is_true_for_a_whole_unbroken_hold_only() -> None:
    parts = fake_parts()
    spec = a_spec(range(12), kind=SequenceKind.PREFILL_ONLY)
    parts.engine.handle(calls.Submit(spec))
    parts.engine.step()
    assert parts.engine.handle(calls.Confirm(spec.seq_id, 3)) is False
    drain(parts)
    assert parts.engine.handle(calls.Confirm(spec.seq_id, 2)) is False
    assert parts.engine.handle(calls.Confirm(spec.seq_id, 3)) is True
    parts.engine.handle(calls.Release(spec.seq_id, 0))
    assert parts.engine.handle(calls.Confirm(spec.seq_id, 3)) is False
    release_all(parts)


def test_held_blocks_are_not_taken_under_cache_pressure() -> None:
    parts = fake_parts(num_blocks=6, max_model_len=24)
    held, _ = prefill(parts, range(8))
    kept = parts.engine.pool.blocks_of(f"sequence:{held.seq_id}")
    for start in range(3):
        run_alone(parts, a_spec(range(100 * start, 100 * start + 10), 4))
    assert parts.engine.pool.blocks_of(f"sequence:{held.seq_id}") == kept
    assert parts.engine.handle(calls.Confirm(held.seq_id, 2)) is True
    release_all(parts)


def test_a_prefill_only_sequence_waits_until_all_its_blocks_are_there() -> None:
    parts = fake_parts(num_blocks=6, max_model_len=24)
    held, _ = prefill(parts, range(16))
    waiting = a_spec(range(100, 112), kind=SequenceKind.PREFILL_ONLY)
    parts.engine.handle(calls.Submit(waiting))
    assert parts.engine.step() is False
    parts.engine.handle(calls.Release(held.seq_id, 0))
    assert token_ids(drain(parts)[waiting.seq_id]) == expected(range(100, 112))[:1]
    release_all(parts)


def test_reservations_are_refused_when_blocks_or_places_are_gone() -> None:
    parts = fake_parts(num_blocks=8, max_model_len=32)
    first = a_spec(range(20), kind=SequenceKind.REMOTE_KV)
    reserved = parts.engine.handle(calls.Reserve(first))
    assert isinstance(reserved, calls.ReservedBlocks)
    assert reserved.num_charged_blocks == len(reserved.block_ids) == 7  # 20 prompt and 6 output tokens
    with pytest.raises(CapacityError, match="3 blocks needed, 1 free"):
        parts.engine.handle(calls.Reserve(a_spec(range(4), 8, kind=SequenceKind.REMOTE_KV)))
    few = fake_parts(limits=EngineLimits(max_num_seqs=1))
    few.engine.handle(calls.Reserve(a_spec(range(4), kind=SequenceKind.REMOTE_KV)))
    with pytest.raises(CapacityError, match="1 sequences needed, 0 free"):
        few.engine.handle(calls.Reserve(a_spec(range(4), kind=SequenceKind.REMOTE_KV)))
    release_all(parts, few)


def test_reservations_do_not_starve_who_waits_in_front_of_them() -> None:
    parts = fake_parts(num_blocks=8, max_model_len=32)
    parts.engine.handle(calls.Reserve(first := a_spec(range(20), kind=SequenceKind.REMOTE_KV)))
    parts.engine.handle(calls.Submit(waiting := a_spec(range(100, 106), 2)))
    assert parts.engine.step() is False
    small = a_spec([1], 2, SequenceKind.REMOTE_KV)
    with pytest.raises(CapacityError, match="1 blocks needed, 0 free"):
        parts.engine.handle(calls.Reserve(small))
    urgent = a_spec([1], 2, SequenceKind.REMOTE_KV, priority=-1)
    parts.engine.handle(calls.Reserve(urgent))
    parts.engine.handle(calls.Release(urgent.seq_id, 0))
    parts.engine.handle(calls.Release(first.seq_id, 0))
    parts.engine.handle(calls.Reserve(small))  # there is room for both
    assert token_ids(drain(parts)[waiting.seq_id]) == expected(range(100, 106), 2)
    release_all(parts)


def test_reservations_leave_a_place_for_who_waits_in_front_of_them() -> None:
    parts = fake_parts(limits=EngineLimits(max_num_seqs=2))
    first, second = (a_spec([each], kind=SequenceKind.REMOTE_KV) for each in (1, 2))
    parts.engine.handle(calls.Reserve(first))
    parts.engine.handle(calls.Reserve(second))
    parts.engine.handle(calls.Submit(waiting := a_spec([3])))
    assert parts.engine.step() is False
    parts.engine.handle(calls.Release(first.seq_id, 0))
    with pytest.raises(CapacityError, match="1 sequences needed, 0 free"):
        parts.engine.handle(calls.Reserve(a_spec([4], kind=SequenceKind.REMOTE_KV)))
    assert token_ids(drain(parts)[waiting.seq_id]) == expected([3])
    release_all(parts)


def test_a_preempted_stream_goes_on_while_reservations_keep_coming() -> None:
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=32, max_prefill_tokens_per_step=16, reserve_output_tokens=1)
    parts = fake_parts(num_blocks=6, max_model_len=24, limits=limits)
    parts.engine.handle(calls.Submit(a_spec(range(7), 12)))
    events: list[Event] = []
    reserved: list[str] = []
    for number in range(60):  # each reservation lives for three steps, and there is always a next one
        spec = a_spec(range(100, 107), 1, SequenceKind.REMOTE_KV)
        with contextlib.suppress(CapacityError):
            parts.engine.handle(calls.Reserve(spec))
        reserved.append(spec.seq_id)
        if number > 1:
            parts.engine.handle(calls.Release(reserved[number - 2], 0))
        parts.engine.step()
        events.extend(event for _, event in parts.engine.take_events())
    assert any(isinstance(event, Preempted) for event in events)
    assert token_ids(events) == expected(range(7), 12)
    release_all(parts)


def test_eos_ends_unless_ignored() -> None:
    def run(ignore: bool) -> int:
        parts = fake_parts()
        return max(len(run_alone(parts, a_spec([each], sampling=SamplingParams(40, temperature=0.0, ignore_eos=ignore)))) for each in range(3))

    assert run(True) == 40
    parts = fake_parts()
    target = a_spec(range(4), sampling=SamplingParams(10, temperature=0.0), kind=SequenceKind.REMOTE_KV)
    parts.engine.handle(calls.Reserve(target))
    parts.engine.handle(calls.Commit(target.seq_id, (SampledToken(FAKE_EOS),)))
    [(_, event)] = parts.engine.take_events()
    assert isinstance(event, Finished)
    assert_engine_empty(parts)
