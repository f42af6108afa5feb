"""Whoever goes away in whatever phase: nothing stays held, and no token is lost, repeated or changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from decode_svc.pool import FailurePolicy
from engine.async_engine import ReservedSequence
from engine.sequence import SequenceSpec
from kvtransfer.errors import SourceGoneError
from kvtransfer.handover import Handover
from kvtransfer.inline import InlineReader
from rpc.errors import StatusError
from rpc.failpoints import configure_failpoints
from tandem.v1 import decode_pb2
from tests.support.alone import alone
from tests.support.cluster import Cluster, open_cluster, until
from tests.support.phases import IN_PREFILL, PHASES, gate_decode, gate_prefill, open_gates
from tests.support.running import Running

PROMPT = list(range(100, 130))


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    configure_failpoints("")


def _start(cluster: Cluster, timeout_s: float = 20.0, **params: Any) -> Running:
    return Running(cluster, cluster.request(PROMPT, **params), timeout_s)


async def test_a_hand_over_that_fails_behind_a_slow_client_keeps_nothing_of_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise SourceGoneError("nothing can be read")

    monkeypatch.setattr(InlineReader, "read", fail)
    # Prefill still works when reading fails behind its last word.
    monkeypatch.setattr(Handover, "guard", lambda handover, step: step)
    async with open_cluster() as cluster:
        configure_failpoints("decode=delay:30")  # a first token that does not get through
        running = _start(cluster)
        prefill = cluster.prefills[0]
        await until(lambda: bool(prefill.device.plans))
        await until(lambda: not len(prefill.pool.holds))
        assert not running.task.done()
        running.call.cancel()
        await asyncio.wait({running.task})
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("transport", ["memory", "inline"])
@pytest.mark.parametrize("end", ["cancel", "deadline"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_in_any_phase_leaves_nothing_held(phase: str, end: str, transport: str) -> None:
    arrange, reached = PHASES[phase]
    async with open_cluster(transports=[transport]) as cluster:
        arrange(cluster)
        running = _start(cluster, timeout_s=0.6 if end == "deadline" else 20.0)
        await until(lambda: reached(cluster))
        if end == "cancel":
            running.call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running.task
        else:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await running.task
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        open_gates(cluster)
        await cluster.assert_nothing_held()
        assert (await cluster.decode.engine.report()).num_late_steps == 0
        configure_failpoints("")
        answer = await cluster.generate(cluster.request(PROMPT))
        assert answer.token_ids == alone(PROMPT)
        assert answer.prompts[0].num_failed_attempts == 0
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("num_prefills", [1, 2])
@pytest.mark.parametrize("phase", IN_PREFILL)
async def test_prefill_dying_in_any_phase_costs_no_token(phase: str, num_prefills: int) -> None:
    arrange, reached = PHASES[phase]
    async with open_cluster(num_prefills=num_prefills) as cluster:
        arrange(cluster)
        running = _start(cluster, temperature=0.9, seed=11)
        await until(lambda: reached(cluster))
        if phase in ("kv_transfer", "kv.hold"):
            await until(lambda: len(running.answer.token_ids) == 1)
        configure_failpoints("")
        await cluster.prefills[0].kill()
        open_gates(cluster)
        answer = await asyncio.wait_for(running.task, 10)
        assert answer.token_ids == alone(PROMPT, temperature=0.9, seed=11)
        last = answer.prompts[-1]
        path = decode_pb2.PROMPT_PATH_HANDOVER if num_prefills == 2 else decode_pb2.PROMPT_PATH_LOCAL_FALLBACK
        assert (last.path, last.num_failed_attempts) == (path, 1)
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("phase", IN_PREFILL)
async def test_without_another_way_the_hand_over_fails_cleanly(phase: str) -> None:
    arrange, reached = PHASES[phase]
    async with open_cluster(policy=FailurePolicy(max_prefill_attempts=1, max_local_prefill_tokens=len(PROMPT) - 1)) as cluster:
        arrange(cluster)
        running = _start(cluster)
        await until(lambda: reached(cluster))
        await cluster.prefills[0].kill()
        open_gates(cluster)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asyncio.wait_for(running.task, 10)
        status = StatusError.of(failed.value)
        assert (status.code, status.reason) == (grpc.StatusCode.UNAVAILABLE, "HANDOVER_FAILED")
        assert status.retry_after_s
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("prefill", ["p0", ""])
async def test_no_request_without_a_deadline_outlives_the_longest_request_time(prefill: str) -> None:
    async with open_cluster(max_request_time_s=0.4) as cluster:
        gate_decode(cluster)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in cluster.decode.stub.Generate(cluster.request(PROMPT, prefill=prefill)):
                pass
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert StatusError.of(ended.value).metadata == {"phase": "decode"}
        open_gates(cluster)
        await cluster.assert_nothing_held()


def _told_of_reserve(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when decode's engine is asked for a reservation."""
    asked, reserve = asyncio.Event(), cluster.decode.engine.reserve

    async def telling(spec: SequenceSpec) -> ReservedSequence:
        asked.set()
        return await reserve(spec)

    monkeypatch.setattr(cluster.decode.engine, "reserve", telling)
    return asked


async def test_blocks_that_others_took_between_two_attempts_are_waited_for_by_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request fits, prefill dies under it, and another one gets its blocks before it asks again: that is no failure of the hand-over."""
    policy = FailurePolicy(max_local_prefill_tokens=0)
    async with open_cluster(num_prefills=2, policy=policy, decode_options={"num_blocks": 10}) as cluster:
        gate_prefill(cluster)
        running = _start(cluster)
        await until(lambda: cluster.prefills[0].device.entered.is_set())
        gate_decode(cluster)
        other = asyncio.ensure_future(cluster.generate(cluster.request(PROMPT, prefill="")))
        await until(lambda: cluster.decode.engine.load().num_waiting == 1)
        configure_failpoints("reserve=delay:0.3")
        asked_again = _told_of_reserve(cluster, monkeypatch)
        await cluster.prefills[0].kill()
        await until(lambda: cluster.decode.device.entered.is_set())
        await asyncio.wait_for(asked_again.wait(), 5)  # the answer comes behind the first step of the other one
        open_gates(cluster)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(running.task, 10)
        assert StatusError.of(refused.value).reason == "NO_KV_BLOCKS"
        assert (await other).token_ids == alone(PROMPT)
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_an_instance_that_is_not_there_is_no_obstacle(max_tokens: int) -> None:
    async with open_cluster(num_prefills=2) as cluster:
        # The other one is connected: gRPC gives up an attempt to connect after 2 s, which a busy machine may take, and the prompt would be computed here.
        await cluster.generate(cluster.request(PROMPT[:4], prefill="p1", max_tokens=1))
        await cluster.prefills[0].kill()
        answer = await cluster.generate(cluster.request(PROMPT, max_tokens=max_tokens))
        assert answer.token_ids == alone(PROMPT, max_tokens=max_tokens)
        assert (answer.prompts[0].prefill_instance, answer.prompts[0].num_failed_attempts) == ("p1", 1)
        await cluster.assert_nothing_held()


async def test_pools_that_do_not_pair_are_a_failed_precondition_and_no_fallback_hides_it() -> None:
    async with open_cluster(decode_options={"fingerprint": "another"}) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(cluster.request(PROMPT))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "model_fingerprint" in str(refused.value.details())
        await cluster.assert_nothing_held()


async def test_an_engine_that_dies_in_prefill_costs_no_token() -> None:
    async with open_cluster() as cluster:
        cluster.prefills[0].device.fail_next = RuntimeError("device lost")
        answer = await cluster.generate(cluster.request(PROMPT))
        assert answer.token_ids == alone(PROMPT)
        assert answer.prompts[0].path == decode_pb2.PROMPT_PATH_LOCAL_FALLBACK
        await cluster.assert_nothing_held()


async def test_an_engine_that_dies_in_decode_ends_every_stream() -> None:
    async with open_cluster() as cluster:
        cluster.decode.device.fail_next = RuntimeError("device lost")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await cluster.generate(cluster.request(PROMPT))
        assert StatusError.of(failed.value).reason == "ENGINE_DEAD"
        await cluster.assert_nothing_held()


async def test_a_prompt_that_fails_in_the_engine_is_not_computed_again_here_when_it_may_not() -> None:
    async with open_cluster(policy=FailurePolicy(max_local_prefill_tokens=0)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await cluster.generate(cluster.request([*PROMPT, 999]))
        assert StatusError.of(failed.value).reason == "HANDOVER_FAILED"
        await cluster.assert_nothing_held()


async def test_cancels_at_random_moments_leave_nothing_held() -> None:
    async with open_cluster(transports=["memory", "inline"], prefill_options={"num_blocks": 128}, decode_options={"num_blocks": 128}) as cluster:
        for round_number in range(60):
            running = _start(cluster, max_tokens=20)
            await asyncio.sleep(round_number * 0.0005)
            running.call.cancel()
            await asyncio.wait({running.task})
        await cluster.assert_nothing_held()
        answer = await cluster.generate(cluster.request(PROMPT))
        assert answer.token_ids == alone(PROMPT)


async def test_a_draining_worker_finishes_what_it_has_and_takes_no_more() -> None:
    async with open_cluster() as cluster:
        gate_decode(cluster)
        running = _start(cluster)
        await until(lambda: cluster.decode.device.entered.is_set())
        drain = asyncio.ensure_future(cluster.decode.server.drain(10))
        await until(lambda: cluster.decode.server.draining)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(cluster.request(PROMPT))
        assert StatusError.of(refused.value).reason == "DRAINING"
        open_gates(cluster)
        assert (await running.task).token_ids == alone(PROMPT)
        assert await drain
        await cluster.assert_nothing_held()
