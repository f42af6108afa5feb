"""n samples of one prompt: computed once, shared by reference, copied on write, each with the tokens it would have alone."""

from __future__ import annotations

import pytest

from engine import calls
from engine.errors import CapacityError, EngineError, HoldBrokenError, SequenceTooLongError
from engine.events import ChunkComputed, Failed, Finished, Preempted, Scheduled, Tokens
from engine.limits import EngineLimits
from engine.sampling_params import FinishReason, SampledToken, SamplingParams
from engine.sequence import SequenceKind
from tests.support.engines import FakeParts, fake_parts, has_ended, sampled_tokens, token_ids
from tests.support.fake_device import POISON_TOKEN
from tests.support.stepping import a_spec, assert_engine_empty, drain, events_of, expected, expected_events, release, submit


def sampling(max_tokens: int = 7, n: int = 3, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens, n, **{"seed": 11, "ignore_eos": True, **params})  # type: ignore[arg-type]


def formula(num_prompt: int, num_output: int, n: int, block_size: int = 4) -> int:
    """Design 7, with no hits."""
    prompt, whole = -(-num_prompt // block_size), -(-(num_prompt + num_output) // block_size)
    return prompt + (n - 1) * (num_prompt % block_size > 0) + n * (whole - prompt)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 4, 7, 8, 13])
def test_each_sample_has_the_tokens_it_has_alone_and_the_prompt_is_computed_once(length: int, n: int) -> None:
    parts = fake_parts()
    params = sampling(n=n, logprobs=2)
    for _ in range(2):  # the second time with the whole prompt cached
        spec = submit(parts, a_spec(range(length), sampling=params))
        events = drain(parts)[spec.seq_id]
        for index in range(n):
            assert sampled_tokens(events, index) == sampled_tokens(expected_events(range(length), sampling=params, index=index))
        assert sorted(event.index for event in events if isinstance(event, Finished)) == list(range(n))
        assert sum(isinstance(event, Scheduled) for event in events) == 1
    num_computed = sum(event.num_tokens for event in events if isinstance(event, ChunkComputed))
    assert num_computed == (length - length // 4 * 4 or 1)
    assert_engine_empty(parts)


def test_samples_draw_with_their_own_index_and_greedy_ones_are_equal() -> None:
    parts = fake_parts()
    drawn, greedy = submit(parts, a_spec(range(6), sampling=sampling())), submit(parts, a_spec(range(6), sampling=sampling(temperature=0.0)))
    events = drain(parts)
    assert len({tuple(token_ids(events[drawn.seq_id], index)) for index in range(3)}) == 3
    assert len({tuple(token_ids(events[greedy.seq_id], index)) for index in range(3)}) == 1
    assert_engine_empty(parts)


def test_a_sample_index_counts_from_the_first_ones() -> None:
    parts = fake_parts()
    spec = submit(parts, a_spec(range(6), sampling=sampling(n=2, sample_index=5)))
    events = drain(parts)[spec.seq_id]
    assert token_ids(events, 1) == expected(range(6), sampling=sampling(n=7), index=6)
    assert_engine_empty(parts)


@pytest.mark.parametrize("kind", [SequenceKind.LOCAL, SequenceKind.REMOTE_KV])
@pytest.mark.parametrize("length", [1, 4, 6, 8])
@pytest.mark.parametrize("n", [1, 3])
def test_all_blocks_are_taken_with_the_sequence_as_admission_counts_them(kind: SequenceKind, length: int, n: int) -> None:
    parts = fake_parts()
    spec = a_spec(range(length), sampling=sampling(n=n), kind=kind)
    if kind is SequenceKind.REMOTE_KV:
        reserved = parts.engine.handle(calls.Reserve(spec))
        assert isinstance(reserved, calls.ReservedBlocks)
        block_ids, num_charged = reserved.block_ids, reserved.num_charged_blocks
    else:
        submit(parts, spec)
        parts.engine.step()
        scheduled = events_of(parts)[spec.seq_id][0]
        assert isinstance(scheduled, Scheduled)
        block_ids, num_charged = scheduled.block_ids, scheduled.num_charged_blocks
    assert num_charged == len(set(block_ids)) == len(block_ids) == parts.engine.report().num_held_blocks == formula(length, 7, n)
    drain(parts)
    release(parts, spec.seq_id)
    assert_engine_empty(parts)


def test_the_partly_used_block_is_copied_once_for_each_other_sample() -> None:
    parts = fake_parts()
    submit(parts, a_spec(range(6), sampling=sampling()))
    drain(parts)
    copies = [copy for plan in parts.device.plans for copy in plan.copies]
    assert len(copies) == 2
    assert len({source for source, _ in copies}) == 1
    assert len({destination for _, destination in copies}) == 2
    parts.device.plans.clear()
    submit(parts, a_spec([50, 51, 52, 53], sampling=sampling()))
    drain(parts)
    assert not any(plan.copies for plan in parts.device.plans)  # it ended with a block: nothing is shared that is written
    assert_engine_empty(parts)


def test_a_copy_waits_on_its_source_when_the_first_sample_ends_at_once() -> None:
    alone = [expected(range(6), sampling=sampling(), index=index) for index in range(3)]
    ends_first = sampling(stop_token_ids=frozenset({alone[0][0]}))
    parts = fake_parts(num_blocks=10, max_model_len=20)
    spec = submit(parts, a_spec(range(6), sampling=ends_first))
    parts.engine.step()  # the prompt: the first sample ends with its first token
    events = events_of(parts)[spec.seq_id]
    assert [(event.index, event.finish.reason) for event in events if isinstance(event, Finished)] == [(0, FinishReason.STOP)]
    assert sum(name.startswith("copy:") for name in parts.engine.report().owners) == 2
    other = submit(parts, a_spec(range(100, 104), 1))  # takes what is free, and writes there in the step that copies
    later = drain(parts)
    assert [token_ids(later[spec.seq_id], index) for index in (1, 2)] == [tokens[1:] for tokens in alone[1:]]
    assert token_ids(later[other.seq_id]) == expected(range(100, 104), 1)
    assert_engine_empty(parts)


@pytest.mark.parametrize("num_steps", range(5))
def test_one_release_ends_all_samples(num_steps: int) -> None:
    parts = fake_parts()
    spec = submit(parts, a_spec(range(14), sampling=sampling()))
    for _ in range(num_steps):
        parts.engine.step()
    release(parts, spec.seq_id)
    parts.engine.check()
    assert_engine_empty(parts)
    assert parts.engine.step() is bool(parts.engine.has_events)


def test_an_error_of_one_sample_fails_all_and_nobody_else() -> None:
    parts = fake_parts()
    bad, good = submit(parts, a_spec(range(6), sampling=sampling())), submit(parts, a_spec(range(6), sampling=sampling()))
    parts.device.poisoned = (f"{bad.seq_id}[1]", 8)
    events = drain(parts)
    assert isinstance(events[bad.seq_id][-1], Failed)
    assert sum(isinstance(event, Failed | Finished) for event in events[bad.seq_id]) == 1
    assert [token_ids(events[good.seq_id], index) for index in range(3)] == [expected(range(6), sampling=sampling(), index=index) for index in range(3)]
    assert_engine_empty(parts)


def test_an_error_in_the_prompt_fails_the_sequence_once() -> None:
    parts = fake_parts()
    bad, good = submit(parts, a_spec([1, POISON_TOKEN], sampling=sampling())), submit(parts, a_spec([1, 2]))
    events = drain(parts)
    assert [type(event) for event in events[bad.seq_id]] == [Scheduled, Failed]
    assert token_ids(events[good.seq_id]) == expected([1, 2])
    assert_engine_empty(parts)


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
def test_every_sample_ends_with_exact_counts(max_tokens: int) -> None:
    parts = fake_parts()
    spec = submit(parts, a_spec(range(6), sampling=sampling(max_tokens)))
    events = drain(parts)[spec.seq_id]
    assert [len(token_ids(events, index)) for index in range(3)] == [max_tokens] * 3
    assert sorted((event.index, event.finish.reason) for event in events if isinstance(event, Finished)) == [(index, FinishReason.LENGTH) for index in range(3)]
    assert sum(len(plan.copies) for plan in parts.device.plans) == (2 if max_tokens > 1 else 0)
    assert_engine_empty(parts)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a_prefill_only_sequence_samples_all_first_tokens_in_one_place(max_tokens: int, hold: bool) -> None:
    limits = EngineLimits(max_num_seqs=1, reserve_output_tokens=8)
    parts = fake_parts(limits=limits, num_blocks=2, max_model_len=64)
    params = sampling(max_tokens, logprobs=1)
    spec = submit(parts, a_spec(range(6), sampling=params, kind=SequenceKind.PREFILL_ONLY, hold=hold))
    events = drain(parts)[spec.seq_id]
    for index in range(3):
        alone = sampled_tokens(expected_events(range(6), sampling=params, index=index))
        assert sampled_tokens(events, index) == alone[:1]
    finishes = [event for event in events if isinstance(event, Finished)]
    if hold and max_tokens:
        assert not finishes
        assert parts.engine.handle(calls.Confirm(spec.seq_id, 2)) is True
    else:
        assert [(event.index, event.finish.reason) for event in finishes] == [(index, FinishReason.LENGTH) for index in range(3)]
    release(parts, spec.seq_id)
    assert_engine_empty(parts)


def hand_over(prompt: range, params: SamplingParams, source: FakeParts, target: FakeParts) -> dict[int, list[int]]:
    """Moves one prompt by hand, and decodes its samples."""
    held = submit(source, a_spec(prompt, sampling=params, kind=SequenceKind.PREFILL_ONLY))
    events = drain(source)[held.seq_id]
    first = tuple(sampled_tokens(events, index)[0] for index in range(params.n))
    spec = a_spec(prompt, sampling=params, kind=SequenceKind.REMOTE_KV)
    reserved = target.engine.handle(calls.Reserve(spec))
    assert isinstance(reserved, calls.ReservedBlocks)
    for number in range(reserved.num_cached_blocks, reserved.num_prompt_blocks):
        target.kv_cache.blocks[reserved.block_ids[number]] = source.kv_cache.blocks[source.engine.pool.blocks_of(f"sequence:{held.seq_id}")[number]]
    with pytest.raises(EngineError, match="first tokens for the"):
        target.engine.handle(calls.Commit(spec.seq_id, (*first, first[0])))
    target.engine.handle(calls.Commit(spec.seq_id, first))
    with pytest.raises(HoldBrokenError):
        target.engine.handle(calls.Commit(spec.seq_id, first))
    release(source, held.seq_id)
    events = [*events_of(target).get(spec.seq_id, []), *drain(target).get(spec.seq_id, [])]
    assert has_ended(events, params.n)
    return {index: [first[index].token_id, *token_ids(events, index)] for index in range(params.n)}


@pytest.mark.parametrize("length", [3, 4, 9])
def test_a_hand_over_of_n_samples_gives_the_tokens_of_one_engine(length: int) -> None:
    source, target = fake_parts(), fake_parts()
    for _ in range(2):
        assert hand_over(range(length), sampling(), source, target) == {index: expected(range(length), sampling=sampling(), index=index) for index in range(3)}
    assert target.engine.report().computed_prompt_tokens == 0
    assert_engine_empty(source)
    assert_engine_empty(target)


def test_a_first_token_of_a_hand_over_can_end_its_sample() -> None:
    parts = fake_parts()
    spec = a_spec(range(6), sampling=sampling(stop_token_ids=frozenset({77})), kind=SequenceKind.REMOTE_KV)
    parts.engine.handle(calls.Reserve(spec))
    parts.engine.handle(calls.Commit(spec.seq_id, (SampledToken(77), SampledToken(1), SampledToken(77))))
    assert [(event.index, event.finish.matched_token_id) for event in events_of(parts)[spec.seq_id] if isinstance(event, Finished)] == [(0, 77), (2, 77)]
    assert parts.engine.report().sequences_by_state == {"decoding": 1}
    drain(parts)
    assert_engine_empty(parts)


def test_samples_count_as_places() -> None:
    parts = fake_parts(limits=EngineLimits(max_num_seqs=4))
    first = a_spec(range(6), sampling=sampling(n=3), kind=SequenceKind.REMOTE_KV)
    parts.engine.handle(calls.Reserve(first))
    assert parts.engine.load().num_in_handover == 3
    second = submit(parts, a_spec(range(100, 106), sampling=sampling(n=2)))
    assert parts.engine.step() is False
    with pytest.raises(CapacityError, match="1 sequences needed, 0 free"):
        parts.engine.handle(calls.Reserve(a_spec([1], kind=SequenceKind.REMOTE_KV)))  # spares the places of who waits in front
    release(parts, first.seq_id)
    parts.engine.step()
    assert parts.engine.load().num_running == 2
    with pytest.raises(CapacityError, match="3 sequences needed, 2 free"):
        parts.engine.handle(calls.Reserve(a_spec(range(6), sampling=sampling(n=3), kind=SequenceKind.REMOTE_KV)))
    drain(parts)
    assert parts.engine.load().num_running == 0
    assert second.seq_id not in parts.engine.report().owners
    assert_engine_empty(parts)


@pytest.mark.parametrize(
    ("n", "num_prompt", "message"),
    [(5, 3, r"n = 5 samples are over max_num_seqs \(4\)"), (4, 30, "n = 4 samples start with 19 blocks, the pool has 12")],
)
def test_more_samples_than_can_ever_start_are_rejected_with_the_arithmetic(n: int, num_prompt: int, message: str) -> None:
    parts = fake_parts(num_blocks=12, max_model_len=48, limits=EngineLimits(max_num_seqs=4, reserve_output_tokens=8))
    spec = a_spec(range(num_prompt), sampling=sampling(8, n))
    submit(parts, spec)
    [event] = events_of(parts)[spec.seq_id]
    assert isinstance(event, Failed)
    assert isinstance(event.error, SequenceTooLongError)
    with pytest.raises(SequenceTooLongError, match=message):
        parts.engine.handle(calls.Reserve(a_spec(range(num_prompt), sampling=sampling(8, n), kind=SequenceKind.REMOTE_KV)))
    assert_engine_empty(parts)


def test_samples_that_do_not_fit_together_preempt_each_other_and_all_end() -> None:
    parts = fake_parts(num_blocks=12, max_model_len=40, limits=EngineLimits(max_num_seqs=8, max_num_batched_tokens=32, reserve_output_tokens=1))
    params = sampling(24, 4)
    spec = submit(parts, a_spec(range(10), sampling=params))
    events = drain(parts)[spec.seq_id]
    preempted = {event.index for event in events if isinstance(event, Preempted)}
    assert preempted
    assert 0 not in preempted
    for index in range(4):
        assert token_ids(events, index) == expected(range(10), sampling=params, index=index)
    assert_engine_empty(parts)


@pytest.mark.parametrize("name", ["s", "s[1]"])
def test_names_of_samples_are_taken_as_long_as_they_live(name: str) -> None:
    parts = fake_parts()
    alone = expected(range(6), sampling=sampling())
    spec = a_spec(range(6), sampling=sampling(n=2, stop_token_ids=frozenset({alone[0]})))
    spec = submit(parts, type(spec)("s", spec.prompt_token_ids, spec.sampling, spec.kind))
    parts.engine.step()  # the first sample has ended, its sequence lives
    other = type(spec)(name, (1, 2), spec.sampling, spec.kind)
    with pytest.raises(EngineError, match="there already"):
        submit(parts, other)
    drain(parts)
    submit(parts, other)
    assert has_ended(drain(parts)[name], 2)
    assert_engine_empty(parts)


def test_tokens_of_samples_are_told_in_the_step_that_computed_them() -> None:
    parts = fake_parts()
    spec = submit(parts, a_spec(range(6), sampling=sampling(3)))
    for position in range(3):
        parts.engine.step()
        told = [(event.position, event.index) for event in events_of(parts)[spec.seq_id] if isinstance(event, Tokens)]
        assert told == [(position, index) for index in range(3)]
    assert_engine_empty(parts)
