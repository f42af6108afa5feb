"""Scheduling, caching, preemption and the life of sequences, over a device whose tokens depend on the KV it reads."""

from __future__ import annotations

import random

import pytest

from engine import calls
from engine.errors import SequenceTooLongError
from engine.events import ChunkComputed, Failed, Finished, Preempted, Scheduled, Tokens
from engine.limits import EngineLimits
from engine.sampling_params import FinishReason, SamplingParams
from engine.sequence import Sequence, SequenceKind
from tests.support.engines import fake_parts, run_alone, token_ids
from tests.support.fake_device import POISON_TOKEN
from tests.support.stepping import a_spec, assert_engine_empty, drain, expected, release_all, submit


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
    assert_engine_empty(parts)


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
    assert_engine_empty(parts)


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
    parts.engine.tables.max_model_len = 9
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
    assert_engine_empty(parts)


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
    assert_engine_empty(parts)


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
    assert_engine_empty(parts)


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
    assert_engine_empty(parts)


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


def test_a_step_of_many_kinds_fails_only_who_is_poisoned() -> None:
    parts = fake_parts()
    sampled = SamplingParams(5, n=3, seed=2, ignore_eos=True)
    decoding, bad_later = submit(parts, a_spec(range(4), 9)), submit(parts, a_spec(range(50, 54), sampling=sampled))
    parts.engine.step()
    parts.device.poisoned = (f"{bad_later.seq_id}[2]", 4)
    bad_now = submit(parts, a_spec([60, POISON_TOKEN, 61], kind=SequenceKind.PREFILL_ONLY))
    samples = submit(parts, a_spec(range(70, 73), sampling=sampled))
    held = submit(parts, a_spec(range(80, 83), kind=SequenceKind.PREFILL_ONLY))
    events = drain(parts)
    assert isinstance(events[bad_now.seq_id][-1], Failed)
    assert isinstance(events[bad_later.seq_id][-1], Failed)
    assert token_ids(events[decoding.seq_id]) == expected(range(4), 9)
    assert token_ids(events[held.seq_id]) == expected(range(80, 83))[:1]
    for index in range(3):
        assert token_ids(events[samples.seq_id], index) == expected(range(70, 73), sampling=sampled, index=index)
    assert parts.engine.handle(calls.Confirm(held.seq_id, 1)) is True
    release_all(parts)


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
