"""The runner over the real targets, against servers that do what a test says."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from bench.generator_health import CpuMeter, generator_of, lag_limit_s, quiet_heap, void_reasons
from bench.plan import Plan, PlannedRequest
from bench.progress import Progress
from bench.record import Outcome
from bench.run import Generator
from bench.runner import Measured, RunLimits, Runner
from bench.tandem_target import TandemTarget
from bench.target import Clock, Exchange, TargetError
from tandem.v1 import gateway_pb2, generation_pb2
from tests.bench.records import record
from tests.bench.scripted import (
    WAIT_S,
    Script,
    ScriptedGateway,
    answer,
    closed_plan,
    last_message,
    plan_of_times,
    scripted_gateway,
    token_message,
)


@asynccontextmanager
async def opened(target: TandemTarget) -> AsyncIterator[TandemTarget]:
    try:
        await target.open()
        yield target
    finally:
        await target.close()


async def run_against(scripts: dict[int, Script], plan: Plan, limits: RunLimits | None = None) -> tuple[Measured, ScriptedGateway]:
    """Returns when no handler runs any more: whatever was left is left on the server too."""
    async with scripted_gateway(scripts) as gateway, opened(TandemTarget(gateway.target)) as target:
        measured = await asyncio.wait_for(Runner(plan, target, limits).run(), WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while gateway.num_running:  # noqa: ASYNC110  # the server tells nobody
                await asyncio.sleep(0.005)
        return measured, gateway


async def test_each_request_goes_out_as_planned_and_comes_back_as_a_record() -> None:
    measured, gateway = await run_against({}, plan_of_times(0.0, 0.02, 0.04))
    assert [each.index for each in measured.records] == [0, 1, 2]
    assert [each.outcome for each in measured.records] == [Outcome.OK] * 3
    first = measured.records[0]
    assert (first.num_prompt_tokens, first.num_output_tokens, first.num_cached_tokens, first.finish_reason) == (3, 3, 2, "length")
    assert [each.num_tokens for each in first.arrived] == [1, 1, 1] and first.path == "handover" and first.counted_by == "usage"
    assert all(each.sent_s >= each.due_s for each in measured.records if each.due_s is not None)
    assert all(each.sent_s <= each.arrived[0].at_s <= each.arrived[-1].at_s <= each.ended_s for each in measured.records)
    sampling = gateway.requests[1].sampling_params
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature, sampling.HasField("seed")) == (3, True, 0.0, True)
    assert gateway.requests[1].token_ids.ids == [0, 7, 8] and gateway.requests[1].model == "m"


async def test_cold_start_is_measured_apart_and_warms_no_prefix() -> None:
    async def slow_first(request: gateway_pb2.GenerateRequest, context: Any) -> None:
        await answer(request, context, first_s=0.2)

    measured, gateway = await run_against({8: slow_first}, plan_of_times(0.0))  # backwards, the first prompt begins with 8
    assert list(gateway.requests[0].token_ids.ids) == [8, 7, 0]
    assert 0.2 <= measured.cold_start["ttft_s"] <= measured.cold_start["e2e_s"]
    assert [each.index for each in measured.records] == [0] and measured.records[0].sent_s < 0.2


async def test_cold_start_that_is_refused_ends_it_in_words() -> None:
    async def refuse(request: gateway_pb2.GenerateRequest, context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")

    with pytest.raises(TargetError, match="first request was not answered: RESOURCE_EXHAUSTED: no room"):
        await run_against({8: refuse}, plan_of_times(0.0))


async def test_a_cold_start_that_takes_too_long_ends_it_and_a_cut_ends_it_too() -> None:
    asked = asyncio.Event()

    async def hang(request: gateway_pb2.GenerateRequest, context: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    with pytest.raises(TargetError, match=r"the first request had not ended after 0\.2 s"):
        await run_against({8: hang}, plan_of_times(0.0), RunLimits(cold_start_s=0.2))
    asked.clear()
    async with scripted_gateway({8: hang}) as gateway, opened(TandemTarget(gateway.target)) as target:
        runner = Runner(plan_of_times(0.0, 0.1), target)
        running = asyncio.create_task(runner.run())
        await asyncio.wait_for(asked.wait(), WAIT_S)
        runner.cut()
        measured = await asyncio.wait_for(running, WAIT_S)
    assert measured.records == () and measured.cold_start == {} and len(gateway.requests) == 1
    assert measured.void == ("the run was cut: 2 of 2 requests were not sent", "no request was measured")


async def test_warm_up_is_sent_and_in_no_figure_of_the_generator() -> None:
    async def block(request: gateway_pb2.GenerateRequest, context: Any) -> None:
        time.sleep(0.3)  # noqa: ASYNC251  # server and generator share this loop: the next sends are late
        await answer(request, context)

    measured, _ = await run_against({0: block}, plan_of_times(0.0, 0.05, 1.5, num_warm_up=2))
    assert [each.warm_up for each in measured.records] == [True, True, False]
    assert measured.records[1].sent_s - 0.05 > 0.1
    assert measured.generator.send_lag_p99_s < 0.1


async def test_a_server_that_stalls_delays_no_later_send() -> None:
    """No coordinated omission: what is due while it stalls is sent while it stalls, and waits for its whole time."""
    stalls = asyncio.Event()

    async def stall(request: gateway_pb2.GenerateRequest, context: Any) -> None:
        await stalls.wait()
        await answer(request, context)

    async def last(request: gateway_pb2.GenerateRequest, context: Any) -> None:
        asyncio.get_running_loop().call_later(1.0, stalls.set)
        await stall(request, context)

    due = [0.05 * number for number in range(8)]
    measured, _ = await run_against(dict.fromkeys(range(7), stall) | {7: last}, plan_of_times(*due))
    ends = min(each.arrived[0].at_s for each in measured.records)
    assert ends >= due[-1] + 1.0
    assert all(each.outcome is Outcome.OK and each.sent_s < due[-1] + 0.9 for each in measured.records)  # all were out while it stalled
    assert all(each.arrived[0].at_s - each.scheduled_s >= ends - due[index] for index, each in enumerate(measured.records))


async def test_a_loop_that_was_blocked_is_measured_as_lag_and_makes_the_run_void() -> None:
    class Blocking(TandemTarget):
        async def send(self, request: PlannedRequest, body: bytes, clock: Clock, exchange: Exchange) -> None:
            if request.index == 0:
                time.sleep(0.3)  # noqa: ASYNC251  # a generator that is busy
            await super().send(request, body, clock, exchange)

    async with scripted_gateway() as gateway, opened(Blocking(gateway.target)) as target:
        measured = await Runner(plan_of_times(0.0, 0.1, 0.2), target).run()
    lags = [each.sent_s - each.scheduled_s for each in measured.records]
    assert lags[0] >= 0.3 and lags[1] >= 0.2 and lags[2] >= 0.1  # late by what was left of the block
    assert measured.generator.send_lag_p99_s > 0.25 and measured.generator.num_late == 3
    assert any("send lag p99" in reason and "above 5.0 ms" in reason for reason in measured.void)


def test_allowed_lag_grows_with_the_limit_on_ttft() -> None:
    assert (lag_limit_s(None), lag_limit_s(0.2), lag_limit_s(2.0)) == (0.005, 0.005, 0.02)
    late = generator_of([record(0, due_s=0.0, sent_s=0.01)], 0.1, 0.02)
    assert late.num_late == 0 and void_reasons(late, 0.02) == () and len(void_reasons(late, 0.005)) == 1


def test_a_busy_generator_is_void_and_told_its_limit() -> None:
    assert void_reasons(Generator(0.0, 0.0, 0.71), 0.005) == ("the generator was busy: it used 71% of a core, above 70%",)


def test_a_long_quiet_end_hides_no_busy_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    used = 0.0
    monkeypatch.setattr(time, "process_time", lambda: used)
    meter = CpuMeter(lambda: now)
    for second in range(101):
        now = float(second)
        used = 0.9 * min(second, 10)
        meter.note()
    assert meter.busiest == pytest.approx(0.9)


def test_cpu_of_a_short_run_is_that_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = used = 0.0
    meter = CpuMeter(lambda: now)
    monkeypatch.setattr(time, "process_time", lambda: used)
    for now, used in ((0.0, 5.0), (1.0, 5.5), (2.0, 5.6)):  # noqa: B007  # both are read by the lambdas
        meter.note()
    assert meter.busiest == pytest.approx(0.3)


def test_the_garbage_collector_rests_and_comes_back() -> None:
    with quiet_heap():
        assert not gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.isenabled() and gc.get_freeze_count() == 0


def _aborting(code: grpc.StatusCode) -> Script:
    async def script(request: gateway_pb2.GenerateRequest, context: Any) -> None:
        await context.abort(code, "not now")

    return script


async def _breaks_off(request: gateway_pb2.GenerateRequest, context: Any) -> None:
    await context.write(token_message(0))
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


async def _too_few(request: gateway_pb2.GenerateRequest, context: Any) -> None:
    await context.write(token_message(0))
    await context.write(last_message(1))


async def _lost_one(request: gateway_pb2.GenerateRequest, context: Any) -> None:
    await context.write(token_message(0, 2))
    await context.write(last_message(3))


async def _stopped(request: gateway_pb2.GenerateRequest, context: Any) -> None:
    await context.write(token_message(0, 3))
    await context.write(last_message(3, reason=generation_pb2.FINISH_REASON_STOP))


async def _without_text(request: gateway_pb2.GenerateRequest, context: Any) -> None:
    await context.write(token_message(0, 3, text=""))
    await context.write(last_message(3))


async def _never_ends(request: gateway_pb2.GenerateRequest, context: Any) -> None:
    await context.write(token_message(0))
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("script", "outcome", "error"),
    [
        (answer, Outcome.OK, ""),
        (_aborting(grpc.StatusCode.RESOURCE_EXHAUSTED), Outcome.REFUSED, "RESOURCE_EXHAUSTED: not now"),
        (_aborting(grpc.StatusCode.UNAVAILABLE), Outcome.REFUSED, "UNAVAILABLE: not now"),
        (_aborting(grpc.StatusCode.INTERNAL), Outcome.FAILED, "INTERNAL: not now"),
        (_aborting(grpc.StatusCode.DEADLINE_EXCEEDED), Outcome.FAILED, "DEADLINE_EXCEEDED: not now"),
        (_aborting(grpc.StatusCode.CANCELLED), Outcome.FAILED, "CANCELLED"),
        (_breaks_off, Outcome.FAILED, "UNAVAILABLE: gone"),
        (_too_few, Outcome.WRONG, "usage says 1 tokens instead of 3"),
        (_lost_one, Outcome.WRONG, "2 tokens arrived instead of 3"),
        (_stopped, Outcome.WRONG, "finish reason stop instead of length"),
        (_without_text, Outcome.WRONG, "no text"),
        (_never_ends, Outcome.TIMEOUT, "it had not ended after 0.4 s"),
    ],
)
async def test_every_end_has_its_outcome_and_none_is_tried_again(script: Script, outcome: Outcome, error: str) -> None:
    measured, gateway = await run_against({0: script}, plan_of_times(0.0, 0.01), RunLimits(request_s=0.4))
    assert measured.records[0].outcome is outcome and measured.records[0].error.startswith(error)
    assert measured.records[1].outcome is Outcome.OK  # and harms no other
    assert len(gateway.requests) == 3  # with the cold start


async def test_what_has_not_ended_after_the_drain_is_a_timeout_and_not_dropped() -> None:
    measured, _ = await run_against({1: _never_ends}, plan_of_times(0.0, 0.0), RunLimits(drain_s=0.3))
    assert [each.outcome for each in measured.records] == [Outcome.OK, Outcome.TIMEOUT]
    assert "0.3 s after the last request was sent" in measured.records[1].error and len(measured.records[1].arrived) == 1
    assert not any("unsent" in reason or "cut" in reason for reason in measured.void)


async def test_an_open_loop_that_its_limit_cuts_is_void_and_says_what_was_not_sent() -> None:
    measured, _ = await run_against({}, plan_of_times(0.0, 30.0, 40.0), RunLimits(run_s=0.3))
    assert [each.index for each in measured.records] == [0]
    assert "the run's limit of 0.3 s left 2 of 3 requests unsent" in measured.void


async def test_a_cut_keeps_what_was_measured_and_says_so() -> None:
    progress = Progress()
    async with scripted_gateway({1: _never_ends}) as gateway, opened(TandemTarget(gateway.target)) as target:
        runner = Runner(plan_of_times(0.0, 0.01, 60.0), target, progress=progress)
        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(WAIT_S):
            while not (progress.outcomes[Outcome.OK] and any(exchange.arrived for exchange in progress.out.values())):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        runner.cut()
        measured = await asyncio.wait_for(running, WAIT_S)
    assert [(each.index, each.outcome) for each in measured.records] == [(0, Outcome.OK), (1, Outcome.FAILED)]
    assert measured.records[1].error == "the run was cut" and len(measured.records[1].arrived) == 1
    assert "the run was cut: 1 of 3 requests were not sent" in measured.void


async def test_a_closed_loop_keeps_as_many_out_as_it_says_and_has_no_lag() -> None:
    most = 0

    async def count(request: gateway_pb2.GenerateRequest, context: Any) -> None:
        nonlocal most
        most = max(most, gateway_of[0].num_running)
        await answer(request, context, first_s=0.02)

    gateway_of: list[ScriptedGateway] = []
    async with scripted_gateway(dict.fromkeys(range(9), count)) as gateway, opened(TandemTarget(gateway.target)) as target:
        gateway_of.append(gateway)
        measured = await Runner(closed_plan(9, concurrency=3), target, cold_start=False).run()
    assert most == 3 and [each.index for each in measured.records] == list(range(9))
    assert all(each.due_s is None and each.outcome is Outcome.OK for each in measured.records)
    assert measured.generator.send_lag_p99_s == 0.0


async def test_a_closed_loop_ends_in_time_and_lets_what_is_out_end() -> None:
    async def slow(request: gateway_pb2.GenerateRequest, context: Any) -> None:
        await answer(request, context, first_s=0.3)

    measured, _ = await run_against(dict.fromkeys(range(50), slow), closed_plan(50, concurrency=2), RunLimits(run_s=0.45))
    assert 2 <= len(measured.records) < 50 and all(each.outcome is Outcome.OK for each in measured.records)
    assert not any("cut" in reason or "unsent" in reason for reason in measured.void)


async def test_the_servers_state_is_sampled_beside_the_run() -> None:
    measured, _ = await run_against({}, plan_of_times(0.0, 0.3), replace(RunLimits(), sample_every_s=0.05))
    assert len(measured.samples) >= 2
    assert {(each.num_waiting, each.kv_usage) for each in measured.samples} == {(4, 0.6)}


async def test_a_target_that_raises_hides_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TandemTarget):
        async def send(self, request: PlannedRequest, body: bytes, clock: Clock, exchange: Exchange) -> None:
            raise RuntimeError("a bug")

    async with scripted_gateway() as gateway, opened(Broken(gateway.target)) as target:
        measured = await Runner(plan_of_times(0.0, 0.01), target, cold_start=False).run()
    assert [(each.outcome, each.error) for each in measured.records] == [(Outcome.FAILED, "RuntimeError: a bug")] * 2
    assert "a bug" in caplog.text


async def test_nobody_there_is_told_at_once() -> None:
    target = TandemTarget("127.0.0.1:1")
    try:
        with pytest.raises(TargetError, match="cannot be loaded"):
            await asyncio.wait_for(target.open(), WAIT_S)
    finally:
        await target.close()


async def test_a_model_that_is_not_served_is_named() -> None:
    async with scripted_gateway() as gateway:
        target = TandemTarget(gateway.target, model="other")
        try:
            with pytest.raises(TargetError, match="does not serve model 'other', but m"):
                await target.open()
        finally:
            await target.close()
