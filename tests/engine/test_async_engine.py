"""The engine thread seen from a loop: order, delivery, death."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from engine.async_engine import SequenceStream
from engine.errors import CapacityError, EngineDeadError
from engine.events import Event, Finished, Preempted
from engine.limits import EngineLimits
from engine.sampling_params import SampledToken, SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from tests.support.engines import collect, fake_engine, running_fake_engine, token_ids
from tests.support.held import assert_nothing_held
from tests.support.stepping import expected


def a_spec(seq_id: str, num_prompt: int = 10, max_tokens: int = 5, kind: SequenceKind = SequenceKind.LOCAL) -> SequenceSpec:
    return SequenceSpec(seq_id, tuple(range(num_prompt)), SamplingParams(max_tokens, temperature=0.0, ignore_eos=True), kind)


async def until_entered(device_entered: threading.Event) -> None:
    assert await asyncio.to_thread(device_entered.wait, 10)


async def to_the_end(stream: SequenceStream) -> None:
    while await stream.get():
        pass


async def test_many_sequences_at_once_all_end() -> None:
    async with running_fake_engine() as (engine, _):
        results = await asyncio.gather(*(collect(engine, a_spec(f"s{index}")) for index in range(30)))
        assert len({tuple(token_ids(events)) for events in results}) == 1
        assert all(isinstance(events[-1], Finished) for events in results)
        await assert_nothing_held(engine)


async def test_a_release_posted_during_a_step_makes_no_step_late() -> None:
    async with running_fake_engine() as (engine, device):
        device.gate = threading.Event()
        engine.submit(a_spec("s", 100))
        await until_entered(device.entered)
        engine.release("s")
        engine.release("s")
        device.gate.set()
        await assert_nothing_held(engine)
        report = await engine.report()
        assert (report.num_steps, report.num_late_steps) == (1, 0)


async def test_a_cancelled_reserve_leaves_nothing_when_its_release_was_posted() -> None:
    async with running_fake_engine() as (engine, device):
        device.gate = threading.Event()
        engine.submit(a_spec("busy", 8, 1))
        await until_entered(device.entered)
        waiting = asyncio.create_task(engine.reserve(a_spec("r", kind=SequenceKind.REMOTE_KV)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        engine.release("r")
        engine.release("busy")
        device.gate.set()
        await assert_nothing_held(engine)


async def test_an_engine_error_is_the_callers_answer_and_the_engine_lives() -> None:
    async with running_fake_engine(num_blocks=4, max_model_len=16) as (engine, _):
        await engine.reserve(a_spec("a", 8, kind=SequenceKind.REMOTE_KV))
        with pytest.raises(CapacityError):
            await engine.reserve(a_spec("b", 8, kind=SequenceKind.REMOTE_KV))
        engine.release("a")
        engine.release("b")
        await assert_nothing_held(engine)


async def test_a_device_error_reaches_every_waiter() -> None:
    engine, device = fake_engine()
    deaths: list[BaseException] = []
    engine.on_death(deaths.append)
    await engine.start()
    device.gate = threading.Event()
    device.fail_next = RuntimeError("the device is gone")
    streams = [engine.submit(a_spec(f"s{index}")) for index in range(3)]
    await until_entered(device.entered)
    device.gate.set()
    async with asyncio.timeout(5):
        for stream in streams:
            with pytest.raises(EngineDeadError, match="the device is gone"):
                await to_the_end(stream)
    with pytest.raises(EngineDeadError):
        await engine.report()
    with pytest.raises(EngineDeadError):
        await engine.submit(a_spec("late")).get()
    engine.release("late")
    assert [str(each) for each in deaths] == ["the device is gone"]


async def test_stop_wakes_waiters_and_is_no_death() -> None:
    engine, _ = fake_engine()
    deaths: list[BaseException] = []
    engine.on_death(deaths.append)
    await engine.start()
    await engine.reserve(a_spec("r", kind=SequenceKind.REMOTE_KV))
    stream = engine.submit(a_spec("w", 10, 0, SequenceKind.PREFILL_ONLY))
    while not isinstance((await stream.get())[-1], Finished):
        pass
    waiter = asyncio.create_task(stream.get())
    await engine.stop()
    with pytest.raises(EngineDeadError, match="stopped"):
        await waiter
    assert deaths == []


async def test_load_is_told_after_every_change() -> None:
    async with running_fake_engine() as (engine, _):
        seen: list[int] = []
        engine.on_load(lambda load: seen.append(load.num_free_blocks))
        await engine.reserve(a_spec("r", 8, 4, SequenceKind.REMOTE_KV))
        assert (engine.load().num_in_handover, engine.load().num_free_blocks) == (1, 61)
        engine.release("r")
        await assert_nothing_held(engine)
        assert seen[0] == 61
        assert seen[-1] == 64


async def test_beat_stands_still_while_a_step_runs_whatever_is_asked_meanwhile() -> None:
    async with running_fake_engine() as (engine, device):
        await engine.report()
        gate = device.gate = threading.Event()
        engine.submit(a_spec("s", 4, 2))
        await until_entered(device.entered)
        beat = engine.beat()
        assert beat is not None
        for _ in range(20):
            await engine.report()
            assert engine.beat() == beat
        device.entered.clear()
        device.gate = threading.Event()
        gate.set()
        await until_entered(device.entered)
        assert engine.beat() == beat + 1  # the next step
        engine.release("s")
        device.gate.set()
        await assert_nothing_held(engine)


async def test_sequences_that_wait_for_blocks_keep_no_thread_busy() -> None:
    async with running_fake_engine(num_blocks=6, max_model_len=24) as (engine, _):
        held = engine.submit(a_spec("held", 16, kind=SequenceKind.PREFILL_ONLY))
        while not token_ids(await held.get()):
            pass
        waiting = asyncio.create_task(collect(engine, replace(a_spec("waits", 12, 2), tenant_salt=b"another")))
        async with asyncio.timeout(5):
            while engine.load().num_waiting != 1 or engine.beat() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        engine.release("held")
        assert len(token_ids(await waiting)) == 2
        await assert_nothing_held(engine)


async def test_a_sequence_that_preempts_itself_says_so_at_once() -> None:
    limits = EngineLimits(max_num_seqs=8, reserve_output_tokens=1)
    async with running_fake_engine(num_blocks=6, max_model_len=24, limits=limits) as (engine, device):
        device.gate = threading.Event()
        stream = engine.submit(a_spec("s", 7, 12))
        await until_entered(device.entered)
        reserving = asyncio.create_task(engine.reserve(a_spec("r", 15, 1, SequenceKind.REMOTE_KV)))
        await asyncio.sleep(0)
        device.gate.set()
        await reserving
        seen: list[Event] = []
        async with asyncio.timeout(5):
            while not any(isinstance(event, Preempted) for event in seen):
                seen.extend(await stream.get())
        engine.release("r")
        while not isinstance(seen[-1], Finished):
            seen.extend(await stream.get())
        assert len(token_ids(seen)) == 12
        engine.release("s")
        await assert_nothing_held(engine)


async def test_calls_are_answered_while_a_step_runs() -> None:
    async with running_fake_engine() as (engine, device):
        held = engine.submit(a_spec("held", 8, kind=SequenceKind.PREFILL_ONLY))
        while not token_ids(await held.get()):
            pass
        device.entered.clear()
        device.gate = threading.Event()
        engine.submit(a_spec("busy", 60))
        await until_entered(device.entered)
        async with asyncio.timeout(5):
            reserved = await engine.reserve(a_spec("r", 8, 3, SequenceKind.REMOTE_KV))
            assert reserved.num_cached_blocks == 2
            assert await engine.acquire("reader", "held", 0, 2)
            assert await engine.confirm("held", 2) is True
            await engine.commit("r", (SampledToken(1),))
            engine.release("held")
            engine.drop("reader")
            assert (await engine.report()).sequences_by_state == {"prefilling": 1, "decoding": 1}
            assert engine.load().num_running == 2
        device.gate.set()
        while not token_ids(await reserved.stream.get()):
            pass
        engine.release("r")
        engine.release("busy")
        await assert_nothing_held(engine)


async def test_blocks_of_a_sequence_that_is_released_in_a_step_come_back_with_its_end() -> None:
    async with running_fake_engine() as (engine, device):
        device.gate = threading.Event()
        engine.submit(a_spec("s", 20))
        await until_entered(device.entered)
        engine.release("s")
        report = await engine.report()
        assert (report.sequences_by_state, list(report.owners)) == ({}, ["step:1"])
        assert engine.load().num_free_blocks == 64 - report.num_held_blocks
        device.gate.set()
        await assert_nothing_held(engine)
        assert engine.load().num_free_blocks == 64


async def test_stop_waits_for_the_step_that_runs_and_launches_none_behind_it() -> None:
    engine, device = fake_engine()
    await engine.start()
    device.gate = threading.Event()
    stream = engine.submit(a_spec("s", 4, 5))
    await until_entered(device.entered)
    with pytest.raises(TimeoutError):
        await engine.stop(timeout_s=0.05)
    stopping = asyncio.create_task(engine.stop(timeout_s=5))
    await asyncio.sleep(0)
    device.gate.set()
    await stopping
    assert len(device.plans) == 1
    events = await stream.get()
    assert len(token_ids(events)) == 1
    with pytest.raises(EngineDeadError, match="stopped"):
        await stream.get()
    assert engine.death is not None


async def test_samples_of_one_prompt_speak_in_one_stream() -> None:
    async with running_fake_engine() as (engine, _):
        spec = replace(a_spec("s", 6), sampling=SamplingParams(5, n=3, seed=1, ignore_eos=True))
        events = await collect(engine, spec)
        assert [token_ids(events, index) for index in range(3)] == [expected(range(6), sampling=spec.sampling, index=index) for index in range(3)]
        await assert_nothing_held(engine)


async def test_nothing_is_lost_when_the_stream_is_read_late() -> None:
    async with running_fake_engine() as (engine, _):
        stream = engine.submit(a_spec("s", 6, 5))
        await assert_nothing_held(engine)
        events = await stream.get()
        assert len(token_ids(events)) == 5
        engine.release("s")


async def test_a_stopped_engine_leaves_no_thread_of_its_device() -> None:
    before = set(threading.enumerate())
    async with running_fake_engine() as (engine, _):
        await collect(engine, a_spec("s"))
        names = {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - before}
        assert {"engine", "fake device"} <= names
    assert not [thread.name for thread in set(threading.enumerate()) - before if not thread.name.startswith("asyncio")]
