"""Log probabilities of a prompt's tokens: computed for all of it, told once and in order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import calls
from engine.events import ChunkComputed, Event, Preempted, PromptLogprobs, Scheduled, Tokens
from engine.limits import EngineLimits
from engine.sampling_params import SampledToken, SamplingParams
from engine.sequence import SequenceKind
from tests.support.engines import fake_parts, prompt_logprobs, token_ids
from tests.support.stepping import a_spec, assert_engine_empty, drain, events_of, expected, expected_events, release, submit

PARAMS = SamplingParams(4, seed=3, ignore_eos=True, prompt_logprobs=2)


def alone(prompt: range) -> list[SampledToken]:
    """The oracle: one chunk, nothing cached."""
    found = prompt_logprobs(expected_events(prompt, sampling=PARAMS))
    assert [token.token_id for token in found] == list(prompt)[1:]
    assert all(len(token.top_logprobs) == 2 for token in found)
    return found


@pytest.mark.parametrize("kind", [SequenceKind.LOCAL, SequenceKind.PREFILL_ONLY])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 21])
@pytest.mark.parametrize("n", [1, 3])
def test_chunks_tell_every_prompt_token_but_the_first_once_and_before_any_token(kind: SequenceKind, length: int, n: int) -> None:
    parts = fake_parts()
    for _ in range(2):  # the second time with everything cached, which is not used
        spec = submit(parts, a_spec(range(length), sampling=replace(PARAMS, n=n), kind=kind, hold=False))
        events = drain(parts)[spec.seq_id]
        assert prompt_logprobs(events) == alone(range(length))
        assert sum(event.num_tokens for event in events if isinstance(event, ChunkComputed)) == length
        assert [event.cached_tokens for event in events if isinstance(event, Scheduled)] == [0]
        kinds = [type(event) for event in events if isinstance(event, PromptLogprobs | Tokens)]
        assert kinds.index(Tokens) == sum(kind is PromptLogprobs for kind in kinds)
    assert_engine_empty(parts)


def test_what_was_computed_for_log_probabilities_is_a_prefix_for_others() -> None:
    parts = fake_parts()
    submit(parts, a_spec(range(9), sampling=PARAMS))
    drain(parts)
    spec = submit(parts, a_spec(range(9)))
    scheduled = drain(parts)[spec.seq_id][0]
    assert isinstance(scheduled, Scheduled)
    assert scheduled.cached_tokens == 8
    assert_engine_empty(parts)


def test_a_prompt_whose_kv_comes_from_elsewhere_uses_its_hits_and_tells_none() -> None:
    parts = fake_parts()
    submit(parts, a_spec(range(9)))
    drain(parts)
    spec = a_spec(range(9), sampling=PARAMS, kind=SequenceKind.REMOTE_KV)
    reserved = parts.engine.handle(calls.Reserve(spec))
    assert isinstance(reserved, calls.ReservedBlocks)
    assert reserved.num_cached_blocks == 2
    release(parts, spec.seq_id)
    full = a_spec(range(8), sampling=PARAMS, kind=SequenceKind.REMOTE_KV)
    parts.engine.handle(calls.Reserve(full))
    first = expected(range(8), sampling=PARAMS)
    parts.engine.handle(calls.Commit(full.seq_id, (SampledToken(first[0]),)))
    events = drain(parts)[full.seq_id]
    assert prompt_logprobs(events) == []
    assert token_ids(events) == first[1:]
    assert_engine_empty(parts)


def test_a_resume_tells_none_and_uses_its_hits() -> None:
    tokens = expected(range(9), sampling=PARAMS)
    parts = fake_parts()
    submit(parts, a_spec(range(9), sampling=PARAMS))
    drain(parts)
    spec = submit(parts, a_spec(range(9), sampling=PARAMS, output_token_ids=tuple(tokens[:2])))
    events = drain(parts)[spec.seq_id]
    assert prompt_logprobs(events) == []
    assert token_ids(events) == tokens[2:]
    assert isinstance(events[0], Scheduled)
    assert events[0].cached_tokens == 8
    assert_engine_empty(parts)


@pytest.mark.parametrize("chunk", [1, 3, 5])
@pytest.mark.parametrize("length", [10, 16])
def test_none_is_told_twice_when_the_prompt_is_preempted_on_its_way(chunk: int, length: int) -> None:
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=32, max_prefill_tokens_per_step=chunk, reserve_output_tokens=1)
    parts = fake_parts(num_blocks=1 + -(-(length + 1) // 4), max_model_len=20, limits=limits)
    old = submit(parts, a_spec(range(100, 103), 6))  # its fifth token needs a second block
    while not token_ids(events_of(parts).get(old.seq_id, [])):
        assert parts.engine.step()
    spec = submit(parts, a_spec(range(length), sampling=PARAMS))
    events: list[Event] = []
    while parts.engine.step():
        parts.engine.check()
        events.extend(events_of(parts).get(spec.seq_id, []))
    first = next(index for index, event in enumerate(events) if isinstance(event, Preempted))
    assert len(prompt_logprobs(events[:first])) == chunk
    assert prompt_logprobs(events) == alone(range(length))
    assert token_ids(events) == expected(range(length), sampling=PARAMS)
    num_hit = chunk // 4 * 4  # what was told needs not be computed again
    assert sum(event.num_tokens for event in events[first:] if isinstance(event, ChunkComputed)) == length - num_hit
    assert_engine_empty(parts)
