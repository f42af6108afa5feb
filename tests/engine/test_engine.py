"""Scheduling, caching, preemption and the life of sequences, over a device whose tokens depend on the KV it reads."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest

from engine import calls
from engine.errors import CapacityError, HoldBrokenError, SequenceTooLongError
from engine.events import ChunkComputed, Event, Failed, Finished, Preempted, Scheduled, Tokens
from engine.limits import EngineLimits
from engine.sampling_params import FinishReason, SampledToken, SamplingParams
from engine.sequence import Sequence, SequenceKind, SequenceSpec
from tests.support.engines import FAKE_EOS, FakeParts, fake_parts, run_alone, token_ids
from tests.support.fake_device import POISON_TOKEN

_ids = itertools.count()


def a_spec(prompt: list[int] | range, max_tokens: int = 6, kind: SequenceKind = SequenceKind.LOCAL, **options: object) -> SequenceSpec:
    sampling = options.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return SequenceSpec(f"s{next(_ids)}", tuple(prompt), sampling, kind, **options)  # type: ignore[arg-type]


def expected(prompt: list[int] | range, max_tokens: int = 6, *, sampling: SamplingParams | None = None) -> list[int]:
    """Tokens of a fresh engine that computes this one sequence alone, unbatched, with nothing cached."""
    limits = EngineLimits(max_num_batched_tokens=256, max_prefill_tokens_per_step=256, enable_prefix_caching=False)
    return run_alone(fake_parts(limits=limits), a_spec(prompt, max_tokens, sampling=sampling))


def drain(parts: FakeParts, max_steps: int = 500) -> dict[str, list[Event]]:
    """Steps until nothing is left to compute; events by sequence."""
    events: dict[str, list[Event]] = {}
    for _ in range(max_steps):
        parts.engine.check()
        if not parts.engine.step():
            break
        for seq_id, event in parts.engine.take_events():
            events.setdefault(seq_id, []).append(event)
    else:
        raise AssertionError("the engine does not come to an end")
    for seq_id, event in parts.engine.take_events():
        events.setdefault(seq_id, []).append(event)
    return events


def assert_engine_empty(parts: FakeParts) -> None:
    report = parts.engine.report()
    assert report.nothing_held, report


def test_a_batch_gives_every_sequence_the_tokens_it_gets_alone() -> None:
    parts = fake_parts()
    generator = random.Random(1)
    specs = [a_spec([generator.randrange(900) for _ in range(generator.randint(1, 40))], generator.randint(1, 12)) for _ in range(20)]
    for spec in specs:
        parts.engine.handle(calls.Submit(spec))
    events = drain(parts)
    for spec in specs:
        assert token_ids(events[spec.seq_id]) == expected(list(spec.prompt_token_ids), spec.sampling.max_tokens)
        assert isinstance(events[spec.seq_id][-1], Finished)
    assert_engine_empty(parts)


def test_prompts_are_computed_in_chunks_within_both_budgets() -> None:
    parts = fake_parts()
    running = a_spec(range(3), 30)
    parts.engine.handle(calls.Submit(running))
    parts.engine.step()
    parts.engine.handle(calls.Submit(a_spec(range(100, 130))))
    drain(parts)
    for plan in parts.device.plans:
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= 32
        assert sum(len(chunk.token_ids) for chunk in plan.chunks if len(chunk.token_ids) > 1) <= 8
    mixed = [plan for plan in parts.device.plans if len(plan.chunks) == 2 and len(plan.chunks[1].token_ids) == 8]
    assert len(mixed) == 3  # the running stream got a token in every step in which the long prompt was computed


@pytest.mark.parametrize("num_shared", [4, 7, 8, 11, 12])
def test_a_prefix_is_hit_in_whole_blocks_and_changes_no_token(num_shared: int) -> None:
    parts = fake_parts()
    first, second = list(range(12)), [*range(num_shared), *range(500, 505)]
    run_alone(parts, a_spec(first))
    spec = a_spec(second)
    parts.engine.handle(calls.Submit(spec))
    events = drain(parts)[spec.seq_id]
    assert token_ids(events) == expected(second)
    assert isinstance(events[0], Scheduled)
    assert events[0].cached_tokens == num_shared // 4 * 4


def test_a_full_prompt_hit_copies_the_last_block_and_computes_one_token() -> None:
    parts = fake_parts()
    prompt = list(range(8))
    reference = run_alone(parts, a_spec(prompt))
    parts.device.plans.clear()
    other = a_spec(prompt)
    assert run_alone(parts, other) == reference
    first_plan = parts.device.plans[0]
    assert len(first_plan.copies) == 1
    assert [len(chunk.token_ids) for chunk in first_plan.chunks] == [1]
    assert first_plan.copies[0][1] in first_plan.chunks[0].block_table
    assert first_plan.copies[0][0] not in first_plan.chunks[0].block_table
    assert_engine_empty(parts)


def test_a_full_hit_in_a_pool_without_a_spare_block_still_ends() -> None:
    parts = fake_parts(num_blocks=2, max_model_len=8)
    spec = a_spec(range(7), 1)
    assert run_alone(parts, spec) == expected(range(7), 1)
    full = a_spec(range(8), 1, SequenceKind.PREFILL_ONLY, hold=False)
    parts.engine.scheduler.max_model_len = 9
    first = run_alone(parts, full)
    assert run_alone(parts, a_spec(range(8), 1, SequenceKind.PREFILL_ONLY, hold=False)) == first
    assert_engine_empty(parts)


def test_tenants_do_not_share_a_prefix() -> None:
    parts = fake_parts()
    run_alone(parts, a_spec(range(12), tenant_salt=b"one"))
    spec = a_spec(range(12), tenant_salt=b"two")
    parts.engine.handle(calls.Submit(spec))
    scheduled = drain(parts)[spec.seq_id][0]
    assert isinstance(scheduled, Scheduled)
    assert scheduled.cached_tokens == 0


def test_growth_preempts_the_youngest_and_it_resumes_with_the_same_tokens() -> None:
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=32, max_prefill_tokens_per_step=16, reserve_output_tokens=1)
    parts = fake_parts(num_blocks=12, max_model_len=48, limits=limits)
    specs = [a_spec([100 * index + each for each in range(6)], 30) for index in range(4)]
    for spec in specs:
        parts.engine.handle(calls.Submit(spec))
    events = drain(parts)
    assert parts.engine.report().num_preemptions > 0
    assert not any(isinstance(event, Preempted) for event in events[specs[0].seq_id])
    for spec in specs:
        assert token_ids(events[spec.seq_id]) == expected(list(spec.prompt_token_ids), 30)
        positions = [event.position for event in events[spec.seq_id] if isinstance(event, Tokens)]
        assert positions == list(range(30))
    assert_engine_empty(parts)


def test_a_resume_goes_on_where_the_output_ended() -> None:
    whole = expected(range(10), 12)
    parts = fake_parts()
    resumed = a_spec(range(10), 12, output_token_ids=tuple(whole[:5]))
    parts.engine.handle(calls.Submit(resumed))
    events = drain(parts)[resumed.seq_id]
    assert token_ids(events) == whole[5:]
    assert next(event.position for event in events if isinstance(event, Tokens)) == 5


def test_sampled_tokens_depend_on_seed_and_position_only() -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    assert expected(range(5), sampling=sampling) == expected(range(5), sampling=sampling)
    assert expected(range(5), sampling=sampling) != expected(range(5), sampling=SamplingParams(max_tokens=8, seed=6, ignore_eos=True))


def test_a_stop_token_ends_and_names_itself() -> None:
    tokens = expected(range(5), 12)
    parts = fake_parts()
    spec = a_spec(range(5), sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=frozenset({tokens[4]})))
    parts.engine.handle(calls.Submit(spec))
    events = drain(parts)[spec.seq_id]
    assert token_ids(events) == tokens[: tokens.index(tokens[4]) + 1]
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.finish.reason, last.finish.matched_token_id) == (FinishReason.STOP, tokens[4])


def test_max_tokens_zero_computes_the_prompt_and_samples_nothing() -> None:
    parts = fake_parts()
    spec = a_spec(range(9), 0)
    parts.engine.handle(calls.Submit(spec))
    events = drain(parts)[spec.seq_id]
    assert token_ids(events) == []
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.finish.reason is FinishReason.LENGTH
    assert sum(event.num_tokens for event in events if isinstance(event, ChunkComputed)) == 9


def test_an_error_of_one_sequence_fails_it_alone() -> None:
    parts = fake_parts()
    bad, good = a_spec([1, 2, POISON_TOKEN]), a_spec([1, 2, 3])
    parts.engine.handle(calls.Submit(bad))
    parts.engine.handle(calls.Submit(good))
    events = drain(parts)
    assert isinstance(events[bad.seq_id][-1], Failed)
    assert token_ids(events[good.seq_id]) == expected([1, 2, 3])
    assert_engine_empty(parts)


def test_a_failed_sequence_leaves_no_prefix_to_hit() -> None:
    parts = fake_parts()
    bad = a_spec([*range(8), POISON_TOKEN])
    parts.engine.handle(calls.Submit(bad))
    parts.engine.step()  # eight tokens, two full blocks
    assert len(parts.engine.pool.find_prefix(Sequence(bad, block_size=4, model_fingerprint="fake", arrival=0).block_names(2))) == 2
    drain(parts)
    again = a_spec(range(9))
    parts.engine.handle(calls.Submit(again))
    scheduled = drain(parts)[again.seq_id][0]
    assert isinstance(scheduled, Scheduled)
    assert scheduled.cached_tokens == 0
    assert_engine_empty(parts)


def test_a_sequence_that_can_never_fit_is_rejected_with_the_arithmetic() -> None:
    parts = fake_parts(num_blocks=4, max_model_len=100)
    spec = a_spec(range(14), 6)
    parts.engine.handle(calls.Submit(spec))
    [(_, event)] = parts.engine.take_events()
    assert isinstance(event, Failed)
    assert isinstance(event.error, SequenceTooLongError)
    assert str(event.error) == "20 tokens take 5 blocks, the pool has 4"
    assert_engine_empty(parts)


@pytest.mark.parametrize("num_steps", range(6))
def test_a_release_in_any_state_gives_everything_back(num_steps: int) -> None:
    parts = fake_parts()
    spec = a_spec(range(20), 6)
    parts.engine.handle(calls.Submit(spec))
    for _ in range(num_steps):
        parts.engine.step()
    parts.engine.handle(calls.Release(spec.seq_id, 0))
    assert_engine_empty(parts)
    parts.engine.handle(calls.Release(spec.seq_id, 0))
    assert run_alone(parts, a_spec(range(20), 6)) == expected(range(20), 6)


# Two engines: the hand-over's ends


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
    decode_parts.engine.handle(calls.Commit(target.seq_id, first))
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


def test_a_reservation_is_not_scheduled_and_its_blocks_are_no_hits() -> None:
    parts = fake_parts()
    parts.engine.handle(calls.Reserve(a_spec(range(8), kind=SequenceKind.REMOTE_KV)))
    assert parts.engine.step() is False
    again = parts.engine.handle(calls.Reserve(a_spec(range(8), kind=SequenceKind.REMOTE_KV)))
    assert isinstance(again, calls.ReservedBlocks)
    assert again.num_cached_blocks == 0


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


def test_a_writer_is_refused_in_a_shared_block_and_after_the_commit() -> None:
    prefill_parts, decode_parts = fake_parts(), fake_parts()
    hand_over(range(9), prefill_parts, decode_parts)
    target = a_spec(range(9), kind=SequenceKind.REMOTE_KV)
    decode_parts.engine.handle(calls.Reserve(target))
    with pytest.raises(HoldBrokenError):
        decode_parts.engine.handle(calls.Acquire("w", target.seq_id, 1, 2))
    decode_parts.engine.handle(calls.Commit(target.seq_id, SampledToken(3)))
    with pytest.raises(HoldBrokenError):
        decode_parts.engine.handle(calls.Acquire("w", target.seq_id, 2, 1))
    with pytest.raises(HoldBrokenError):
        decode_parts.engine.handle(calls.Commit(target.seq_id, SampledToken(3)))


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


def test_held_blocks_are_not_taken_under_cache_pressure() -> None:
    parts = fake_parts(num_blocks=6, max_model_len=24)
    held, _ = prefill(parts, range(8))
    kept = parts.engine.pool.blocks_of(f"sequence:{held.seq_id}")
    for start in range(3):
        run_alone(parts, a_spec(range(100 * start, 100 * start + 10), 4))
    assert parts.engine.pool.blocks_of(f"sequence:{held.seq_id}") == kept
    assert parts.engine.handle(calls.Confirm(held.seq_id, 2)) is True


def test_a_prefill_only_sequence_waits_until_all_its_blocks_are_there() -> None:
    parts = fake_parts(num_blocks=6, max_model_len=24)
    held, _ = prefill(parts, range(16))
    waiting = a_spec(range(100, 112), kind=SequenceKind.PREFILL_ONLY)
    parts.engine.handle(calls.Submit(waiting))
    assert parts.engine.step() is False
    parts.engine.handle(calls.Release(held.seq_id, 0))
    assert token_ids(drain(parts)[waiting.seq_id]) == expected(range(100, 112))[:1]


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


def test_eos_ends_unless_ignored() -> None:
    def run(ignore: bool) -> int:
        parts = fake_parts()
        return max(len(run_alone(parts, a_spec([each], sampling=SamplingParams(40, 0.0, ignore_eos=ignore)))) for each in range(3))

    assert run(True) == 40
    parts = fake_parts()
    target = a_spec(range(4), sampling=SamplingParams(10, 0.0), kind=SequenceKind.REMOTE_KV)
    parts.engine.handle(calls.Reserve(target))
    parts.engine.handle(calls.Commit(target.seq_id, SampledToken(FAKE_EOS)))
    [(_, event)] = parts.engine.take_events()
    assert isinstance(event, Finished)
    assert_engine_empty(parts)
