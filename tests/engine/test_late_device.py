"""Device time is not host time: what a step in flight may touch is nobody else's before the step is completed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import calls
from engine.errors import CapacityError, HoldBrokenError
from engine.events import ChunkComputed, Finished
from engine.limits import EngineLimits
from engine.sampling_params import SampledToken, SamplingParams
from engine.sequence import SequenceKind
from tests.support.engines import FakeParts, token_ids
from tests.support.fake_device import POISON_TOKEN
from tests.support.stepping import a_spec, assert_engine_empty, drain, events_of, expected, finish_step, late_parts, release, submit


def reserve_all(parts: FakeParts) -> tuple[str, tuple[int, ...]]:
    """Reserves every block that can be had, and writes into them as a hand-over would."""
    spec = a_spec([500 + each for each in range(4 * parts.engine.pool.num_allocatable - 1)], 1, SequenceKind.REMOTE_KV)
    reserved = parts.engine.handle(calls.Reserve(spec))
    assert isinstance(reserved, calls.ReservedBlocks)
    parts.kv_cache.blocks[list(reserved.block_ids)] = 0xAB
    return spec.seq_id, reserved.block_ids


@pytest.mark.parametrize("num_steps", range(5))
def test_blocks_of_a_sequence_that_is_released_in_flight_are_handed_out_after_the_step_only(num_steps: int) -> None:
    parts = late_parts(num_blocks=8, max_model_len=32)
    spec = submit(parts, a_spec(range(14), 6))
    for _ in range(num_steps):
        assert parts.engine.launch() is not None
        finish_step(parts)
    assert parts.engine.launch() is not None
    in_flight = set(parts.engine.pool.blocks_of(f"sequence:{spec.seq_id}"))
    release(parts, spec.seq_id)
    parts.engine.check()
    assert parts.engine.report().owners == {f"step:{num_steps + 1}": len(in_flight)}
    other, reserved = reserve_all(parts)
    assert not in_flight & set(reserved)
    with pytest.raises(CapacityError):
        parts.engine.handle(calls.Reserve(a_spec([1], 1, SequenceKind.REMOTE_KV)))
    parts.device.finish()  # writes now
    assert (parts.kv_cache.blocks[list(reserved)] == 0xAB).all()
    assert parts.engine.report().owners.keys() == {f"step:{num_steps + 1}", f"sequence:{other}"}
    parts.engine.complete()
    assert parts.engine.report().owners.keys() == {f"sequence:{other}"}
    assert in_flight <= set(reserve_all(parts)[1])
    release(parts, other, *[name.removeprefix("sequence:") for name in parts.engine.report().owners])
    assert_engine_empty(parts)


def test_a_chunk_is_announced_and_its_blocks_are_hits_after_the_step_only() -> None:
    parts = late_parts()
    spec = submit(parts, a_spec(range(8), kind=SequenceKind.PREFILL_ONLY))
    parts.engine.launch()
    for finished in (False, True):
        if finished:
            parts.device.finish()
        assert not any(isinstance(event, ChunkComputed) for event in events_of(parts).get(spec.seq_id, []))
        with pytest.raises(HoldBrokenError, match="not filled"):
            parts.engine.handle(calls.Acquire("r", spec.seq_id, 0, 1))
        twin = a_spec(range(8), 1, SequenceKind.REMOTE_KV)
        reserved = parts.engine.handle(calls.Reserve(twin))
        assert isinstance(reserved, calls.ReservedBlocks)
        assert reserved.num_cached_blocks == 0
        release(parts, twin.seq_id)
    parts.engine.complete()
    assert [event.num_filled_blocks for event in events_of(parts)[spec.seq_id] if isinstance(event, ChunkComputed)] == [2]
    assert parts.engine.handle(calls.Acquire("r", spec.seq_id, 0, 2)) == parts.engine.pool.blocks_of(f"sequence:{spec.seq_id}")
    parts.engine.handle(calls.Drop("r"))
    release(parts, spec.seq_id)
    assert_engine_empty(parts)


def test_calls_are_answered_while_a_step_runs() -> None:
    parts = late_parts()
    held = submit(parts, a_spec(range(8), kind=SequenceKind.PREFILL_ONLY))
    parts.engine.launch()
    finish_step(parts)
    busy = submit(parts, a_spec(range(100, 120)))
    parts.engine.launch()
    assert parts.engine.handle(calls.Confirm(held.seq_id, 2)) is True
    target = a_spec(range(8), 2, SequenceKind.REMOTE_KV)
    reserved = parts.engine.handle(calls.Reserve(target))
    assert isinstance(reserved, calls.ReservedBlocks)
    assert reserved.num_cached_blocks == 2
    first = expected(range(8), 2)
    parts.engine.handle(calls.Commit(target.seq_id, (SampledToken(first[0]),)))
    assert parts.engine.report().sequences_by_state == {"held": 1, "prefilling": 1, "decoding": 1}
    release(parts, held.seq_id)
    finish_step(parts)
    parts.device.late = False
    events = drain(parts)
    assert token_ids(events[target.seq_id]) == first[1:]
    assert token_ids(events[busy.seq_id]) == expected(range(100, 120))
    assert_engine_empty(parts)


def test_the_result_of_a_released_sequence_is_dropped_even_when_its_name_is_given_anew() -> None:
    parts = late_parts()
    spec = submit(parts, a_spec([1, 2, 3]))
    parts.engine.launch()
    release(parts, spec.seq_id)
    submit(parts, replace(a_spec([4, 5, 6, 7]), seq_id=spec.seq_id))
    parts.engine.take_events()
    finish_step(parts)
    assert events_of(parts) == {}
    parts.device.late = False
    events = drain(parts)[spec.seq_id]
    assert token_ids(events) == expected([4, 5, 6, 7])
    assert_engine_empty(parts)


def test_an_error_of_a_released_sequence_is_dropped() -> None:
    parts = late_parts()
    bad, good = submit(parts, a_spec([1, POISON_TOKEN])), submit(parts, a_spec([1, 2]))
    parts.engine.launch()
    release(parts, bad.seq_id)
    parts.engine.take_events()
    finish_step(parts)
    assert bad.seq_id not in events_of(parts)
    parts.device.late = False
    drain(parts)
    assert_engine_empty(parts)
    assert good.seq_id not in parts.engine.report().owners


def test_both_ends_of_a_copy_in_flight_outlive_their_sequence() -> None:
    parts = late_parts()
    parts.device.late = False
    first = submit(parts, a_spec(range(8)))
    drain(parts)
    parts.device.late = True
    second = submit(parts, a_spec(range(8), 1))
    parts.engine.launch()
    release(parts, second.seq_id)
    in_flight = parts.engine.pool.blocks_of("step:" + str(parts.engine.report().num_steps))
    finish_step(parts)
    [(source, destination)] = parts.device.plans[-1].copies
    assert {source, destination} <= set(in_flight)
    assert first.seq_id != second.seq_id
    assert_engine_empty(parts)


@pytest.mark.parametrize("num_steps", [2, 3])
def test_samples_that_are_released_in_flight_keep_their_copies_until_the_step_is_done(num_steps: int) -> None:
    parts = late_parts()
    spec = submit(parts, a_spec(range(6), sampling=SamplingParams(6, n=3, ignore_eos=True)))
    for _ in range(num_steps - 1):
        parts.engine.launch()
        finish_step(parts)
    parts.engine.launch()
    held = parts.engine.report().num_held_blocks
    release(parts, spec.seq_id)
    report = parts.engine.report()
    assert (report.num_held_blocks, list(report.owners)) == (held, [f"step:{num_steps}"])
    finish_step(parts)
    assert len(parts.device.plans[-1].copies) == (2 if num_steps == 2 else 0)
    assert_engine_empty(parts)


def test_a_step_is_late_only_for_a_release_that_the_last_look_could_have_found() -> None:
    parts = late_parts()
    before, after = submit(parts, a_spec([1, 2])), submit(parts, a_spec([3, 4]))
    parts.engine.launch(looked_ns=100)
    parts.engine.handle(calls.Release(before.seq_id, 99))
    parts.engine.handle(calls.Release(after.seq_id, 101))
    assert parts.engine.report().num_late_steps == 1
    finish_step(parts)
    assert parts.engine.report().computed_prompt_tokens == 4  # computed for nobody, but computed
    assert_engine_empty(parts)


def test_only_one_step_is_in_flight() -> None:
    parts = late_parts()
    submit(parts, spec := a_spec([1], 1))
    parts.engine.launch()
    with pytest.raises(AssertionError, match="in flight"):
        parts.engine.launch()
    with pytest.raises(AssertionError, match="no step is done"):
        parts.engine.complete()
    finish_step(parts)
    assert isinstance(events_of(parts)[spec.seq_id][-1], Finished)
    assert_engine_empty(parts)


def test_a_full_pool_waits_for_the_step_that_holds_its_blocks() -> None:
    parts = late_parts(num_blocks=4, max_model_len=16, limits=EngineLimits(max_num_seqs=4, reserve_output_tokens=1))
    spec = submit(parts, a_spec(range(12), 4))
    parts.engine.launch()
    release(parts, spec.seq_id)
    waiting = submit(parts, a_spec(range(100, 112), 4))
    finish_step(parts)
    parts.device.late = False
    assert token_ids(drain(parts)[waiting.seq_id]) == expected(range(100, 112), 4)
    assert_engine_empty(parts)
