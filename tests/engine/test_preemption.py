"""Samples that gave their blocks back: cached blocks, recompute up to a limit, else KV from elsewhere; never those that wait for KV or are announced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import calls
from engine.errors import EngineError, HoldBrokenError
from engine.events import ChunkComputed, Event, Failed, Finished, Preempted, Readmitted, Scheduled
from engine.sampling_params import SampledToken
from engine.sequence import SequenceKind, SequenceSpec
from tests.support.engines import FakeParts, fake_parts, sampled_tokens, token_ids
from tests.support.preempting import PARAMS, SHORT, STOP_TOKEN, preempted, readmitted, tight_parts
from tests.support.stepping import a_spec, assert_engine_empty, drain, events_of, expected, release, submit


def compute_elsewhere(target: FakeParts, spec: SequenceSpec, told: Readmitted, sent: list[int]) -> None:
    """As its owner: prompt and output by a prefill instance, copied into the named blocks, committed with the next token."""
    source = fake_parts()
    resume = a_spec(
        list(spec.prompt_token_ids),
        sampling=spec.sampling.of_sample(told.index),
        kind=SequenceKind.PREFILL_ONLY,
        output_token_ids=(*spec.output_token_ids, *sent),
    )
    submit(source, resume)
    [first] = sampled_tokens(drain(source)[resume.seq_id])
    from_blocks = source.engine.pool.blocks_of(f"sequence:{resume.seq_id}")
    assert len(from_blocks) == told.num_prompt_blocks
    num_left = told.num_prompt_blocks - told.num_cached_blocks
    written = target.engine.handle(calls.Acquire("w", told.sample_id, told.num_cached_blocks, num_left))
    assert written == told.block_ids[told.num_cached_blocks : told.num_prompt_blocks]
    assert isinstance(written, tuple)
    target.kv_cache.blocks[list(written)] = source.kv_cache.blocks[list(from_blocks[told.num_cached_blocks :])]
    target.engine.handle(calls.Drop("w"))
    target.engine.handle(calls.Commit(told.sample_id, (first,)))
    sent.append(first.token_id)
    source.kv_cache.close()


def run_with_readmissions(parts: FakeParts, specs: list[SequenceSpec]) -> tuple[dict[tuple[str, int], list[int]], list[Readmitted]]:
    """Steps to the end as the owner of all; tokens of each sample, and who came back."""
    tokens: dict[tuple[str, int], list[int]] = {(spec.seq_id, index): [] for spec in specs for index in range(spec.sampling.n)}
    by_id, readmissions = {spec.seq_id: spec for spec in specs}, list[Readmitted]()
    for _ in range(600):
        parts.engine.check()
        moved = parts.engine.step()
        for seq_id, events in events_of(parts).items():
            for (told_id, index), sent in tokens.items():
                if told_id == seq_id:
                    sent.extend(token_ids(events, index))
            for event in events:
                if isinstance(event, Readmitted):
                    readmissions.append(event)
                    compute_elsewhere(parts, by_id[seq_id], event, tokens[seq_id, event.index])
                    moved = True
        if not moved:
            return tokens, readmissions
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("max_recompute_tokens", [None, 0, 10, 1000])
def test_a_long_sample_comes_back_by_its_owner_and_a_short_one_by_recompute(max_recompute_tokens: int | None, n: int) -> None:
    parts = tight_parts()
    params = replace(PARAMS, n=n)
    specs = [a_spec([100 * each + token for token in range(6)], sampling=params, max_recompute_tokens=max_recompute_tokens) for each in range(4)]
    for spec in specs:
        submit(parts, spec)
    tokens, readmissions = run_with_readmissions(parts, specs)
    for (seq_id, index), found in tokens.items():
        prompt = next(spec.prompt_token_ids for spec in specs if spec.seq_id == seq_id)
        assert found == expected(list(prompt), sampling=params, index=index)
    report = parts.engine.report()
    assert report.num_preemptions >= report.num_readmissions == len(readmissions)
    assert bool(readmissions) == (max_recompute_tokens in (0, 10))
    assert_engine_empty(parts)


def test_filled_blocks_of_a_victim_stay_cached_and_are_hit_when_it_comes_back() -> None:
    parts = tight_parts(num_blocks=7)
    _, events = preempted(parts, max_recompute_tokens=None)
    assert parts.engine.report().num_cached_blocks >= 3
    later = drain(parts)["s"]
    assert [event.num_tokens for event in later if isinstance(event, ChunkComputed)] == [1]  # of 13
    assert token_ids(events) + token_ids(later) == expected(range(100, 109), sampling=SHORT)
    assert_engine_empty(parts)


def test_a_readmitted_sample_waits_in_a_place_with_all_its_blocks_and_is_not_computed() -> None:
    parts = tight_parts(num_blocks=7)
    told, _ = readmitted(parts)
    assert (told.index, told.sample_id, told.num_prompt_blocks, told.num_cached_blocks, len(told.block_ids)) == (0, "s", 4, 3, 4)
    assert parts.engine.report().sequences_by_state == {"waiting_for_kv": 1}
    assert parts.engine.load().num_in_handover == 1
    assert parts.engine.step() is False
    release(parts, "s")
    assert parts.engine.load().num_in_handover == 0
    assert_engine_empty(parts)


def test_a_readmitted_sample_is_written_as_a_reservation_is() -> None:
    parts = tight_parts(num_blocks=7)
    told, _ = readmitted(parts)
    for first, count in ((0, 4), (3, 2), (4, 1)):  # into cached blocks, behind the last one
        with pytest.raises(HoldBrokenError):
            parts.engine.handle(calls.Acquire("w", "s", first, count))
    assert parts.engine.handle(calls.Acquire("w", "s", 3, 1)) == told.block_ids[3:4]
    with pytest.raises(EngineError, match="2 first tokens for the 1 samples"):
        parts.engine.handle(calls.Commit("s", (SampledToken(1), SampledToken(2))))
    release(parts, "s")
    assert parts.engine.report().owners == {"reader:w": 1}
    with pytest.raises(HoldBrokenError, match="gone"):
        parts.engine.handle(calls.Commit("s", (SampledToken(1),)))
    parts.engine.handle(calls.Drop("w"))
    assert_engine_empty(parts)


def test_the_next_token_can_end_a_readmitted_sample() -> None:
    parts = tight_parts(num_blocks=7)
    readmitted(parts)
    parts.engine.handle(calls.Commit("s", (SampledToken(STOP_TOKEN),)))
    [event] = events_of(parts)["s"]
    assert isinstance(event, Finished)
    assert event.finish.matched_token_id == STOP_TOKEN
    assert_engine_empty(parts)


def test_samples_of_a_sequence_are_released_in_whatever_state_each_of_them_is() -> None:
    parts = tight_parts(num_blocks=8)
    told, _ = readmitted(parts, n=2)
    assert (told.index, told.sample_id) == (1, "s[1]")
    assert parts.engine.report().sequences_by_state == {"decoding": 1, "waiting_for_kv": 1}
    release(parts, "s")
    assert_engine_empty(parts)


@pytest.mark.parametrize("max_recompute_tokens", [0, None])
def test_an_error_of_a_sibling_fails_a_preempted_sample(max_recompute_tokens: int | None) -> None:
    parts = tight_parts(num_blocks=8)
    _, events = preempted(parts, n=2, max_recompute_tokens=max_recompute_tokens)
    if max_recompute_tokens is not None:
        parts.engine.step()  # it waits for KV
    parts.device.poisoned = ("s", 9 + len(token_ids(events)))
    later = drain(parts)["s"]
    assert isinstance(later[-1], Failed)
    assert not any(isinstance(event, Finished) for event in (*events, *later))
    assert_engine_empty(parts)


def test_a_prompt_that_was_never_finished_is_always_computed_here() -> None:
    parts = tight_parts(num_blocks=8)
    old = submit(parts, a_spec(range(8), sampling=SHORT))
    for _ in range(4):
        parts.engine.step()
    young = submit(parts, a_spec(range(100, 118), 2, max_recompute_tokens=0))
    # Its first chunk is 16 of 18 tokens; then the older one, with 13, needs a fourth block.
    events = drain(parts)
    kinds = [type(event) for event in events[young.seq_id] if isinstance(event, Preempted | Readmitted | ChunkComputed)]
    assert kinds[:3] == [ChunkComputed, Preempted, ChunkComputed]
    assert Readmitted not in kinds
    assert token_ids(events[young.seq_id]) == expected(range(100, 118), 2)
    assert isinstance(events[old.seq_id][-1], Finished)
    assert_engine_empty(parts)


def test_announced_blocks_and_reservations_are_never_victims() -> None:
    parts = tight_parts(num_blocks=10)
    growing = submit(parts, a_spec(range(4), sampling=PARAMS))
    held = submit(parts, a_spec(range(100, 108), kind=SequenceKind.PREFILL_ONLY))
    announced = submit(parts, a_spec(range(300, 320), kind=SequenceKind.PREFILL_ONLY))
    reserved = a_spec(range(200, 203), 1, SequenceKind.REMOTE_KV)
    parts.engine.handle(calls.Reserve(reserved))
    seen: dict[str, list[Event]] = {}
    for _ in range(40):
        parts.engine.step()
        for seq_id, events in events_of(parts).items():
            seen.setdefault(seq_id, []).extend(events)
    assert [type(event) for event in seen[held.seq_id] if isinstance(event, Preempted | Scheduled)] == [Scheduled]
    assert any(isinstance(event, Preempted) for event in seen[growing.seq_id])
    assert parts.engine.handle(calls.Confirm(held.seq_id, 2)) is True
    release(parts, held.seq_id, announced.seq_id, reserved.seq_id)
    for seq_id, events in drain(parts).items():
        seen[seq_id].extend(events)
    assert token_ids(seen[growing.seq_id]) == expected(range(4), sampling=PARAMS)
    assert_engine_empty(parts)
