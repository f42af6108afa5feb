"""Prefill goes away behind the first tokens of several samples: each of them goes on by itself, and no stream changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from decode_svc.pool import FailurePolicy
from rpc.errors import StatusError
from rpc.failpoints import configure_failpoints
from tandem.v1 import decode_pb2
from tests.support.alone import alone_prompt_logprobs, alone_streams
from tests.support.cluster import Cluster, open_cluster, until
from tests.support.phases import IN_PREFILL, gate_decode, open_gates
from tests.support.running import Running

PROMPT = list(range(100, 130))
FOUR: dict[str, Any] = {"n": 4, "temperature": 0.8, "seed": 5}
BEHIND_FIRST = ("kv_transfer", "kv.hold")


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    configure_failpoints("")


async def _lose_prefill(cluster: Cluster, phase: str, params: dict[str, Any]) -> Running:
    """Runs a request until all first tokens are out (when the phase is behind them), and kills the first prefill instance."""
    arrange, reached = IN_PREFILL[phase]
    arrange(cluster)
    running = Running(cluster, cluster.request(PROMPT, **params))
    await until(lambda: reached(cluster))
    if phase in BEHIND_FIRST:
        await until(lambda: len(running.answer.samples) == params["n"])
    configure_failpoints("")
    await cluster.prefills[0].kill()
    open_gates(cluster)
    return running


@pytest.mark.parametrize("transport", ["memory", "inline"])
@pytest.mark.parametrize("num_prefills", [1, 2])
@pytest.mark.parametrize("phase", IN_PREFILL)
async def test_prefill_dying_in_any_phase_costs_no_token_of_any_sample(phase: str, num_prefills: int, transport: str) -> None:
    params = FOUR | {"prompt_logprobs": 1}
    async with open_cluster(num_prefills=num_prefills, transports=[transport]) as cluster:
        running = await _lose_prefill(cluster, phase, params)
        answer = await asyncio.wait_for(running.task, 10)
        assert answer.streams == alone_streams(PROMPT, **params)
        assert answer.prompt_logprobs == alone_prompt_logprobs(PROMPT, **params)
        path = decode_pb2.PROMPT_PATH_HANDOVER if num_prefills == 2 else decode_pb2.PROMPT_PATH_LOCAL_FALLBACK
        assert {(report.path, report.num_failed_attempts) for report in answer.prompts[phase in BEHIND_FIRST :]} == {(path, 1)}
        assert len(answer.prompts) == (5 if phase in BEHIND_FIRST else 1)
        assert answer.handover.transport == (transport if num_prefills == 2 else "")
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("num_blocks", [8 + 3 + 4 * (10 - 8), 64])
@pytest.mark.parametrize("num_prefills", [1, 2])
@pytest.mark.parametrize("phase", BEHIND_FIRST)
async def test_samples_that_go_on_by_themselves_need_no_more_room_than_before_and_share_the_prompt(phase: str, num_prefills: int, num_blocks: int) -> None:
    async with open_cluster(num_prefills=num_prefills, decode_options={"num_blocks": num_blocks}) as cluster:
        running = await _lose_prefill(cluster, phase, FOUR)
        answer = await asyncio.wait_for(running.task, 10)
        assert answer.streams == alone_streams(PROMPT, **FOUR)
        computed = [(await engine.report()).computed_prompt_tokens for engine in (cluster.decode.engine, cluster.prefills[-1].engine)]
        # The first one's 31 tokens; the others find 28 of theirs.
        expected = 31 + 3 * 3
        assert computed == ([0, expected] if num_prefills == 2 else [expected, len(PROMPT)])
        assert answer.handover.num_blocks == (8 if num_prefills == 2 else 0)
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("phase", BEHIND_FIRST)
async def test_samples_that_had_ended_are_not_resumed(phase: str) -> None:
    streams = alone_streams(PROMPT, **FOUR)
    params = FOUR | {"stop_token_ids": frozenset({streams[1][0], streams[3][0]})}
    async with open_cluster(num_prefills=2) as cluster:
        running = await _lose_prefill(cluster, phase, params)
        answer = await asyncio.wait_for(running.task, 10)
        assert answer.streams == alone_streams(PROMPT, **params)
        assert [len(answer.samples[index]) for index in (1, 3)] == [1, 1]
        assert len(answer.prompts) == 3  # the first report, and those of the two that go on
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("n", [1, 4])
async def test_an_instance_too_small_for_the_tokens_that_went_out_costs_an_attempt(n: int) -> None:
    params = FOUR | {"n": n}
    async with open_cluster(num_prefills=2, prefill_options={"max_model_len": len(PROMPT) + 1}) as cluster:
        running = await _lose_prefill(cluster, "kv.hold", params)
        answer = await asyncio.wait_for(running.task, 10)
        assert answer.streams == alone_streams(PROMPT, **params)
        assert {(report.path, report.num_failed_attempts) for report in answer.prompts[1:]} == {(decode_pb2.PROMPT_PATH_LOCAL_FALLBACK, 2)}
        await cluster.assert_nothing_held()


async def test_a_prompt_too_long_for_prefill_is_the_callers_mistake() -> None:
    async with open_cluster(prefill_options={"max_model_len": len(PROMPT)}) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await cluster.generate(cluster.request(PROMPT, **FOUR))
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("phase", IN_PREFILL)
async def test_without_another_way_the_hand_over_fails_cleanly(phase: str) -> None:
    async with open_cluster(policy=FailurePolicy(max_prefill_attempts=1, max_local_prefill_tokens=len(PROMPT) - 1)) as cluster:
        running = await _lose_prefill(cluster, phase, FOUR)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asyncio.wait_for(running.task, 10)
        assert StatusError.of(failed.value).reason == "HANDOVER_FAILED"
        assert [len(tokens) for tokens in running.answer.samples.values()] == ([1] * 4 if phase in BEHIND_FIRST else [])
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("way", ["reserve", "prefill.queue", "prefill", "kv_transfer", "kv.hold", "local"])
async def test_a_client_that_leaves_while_samples_go_on_by_themselves_leaves_nothing_held(way: str) -> None:
    async with open_cluster(num_prefills=1 if way == "local" else 2) as cluster:
        arrange, reached = IN_PREFILL["kv.hold"]
        arrange(cluster)
        running = Running(cluster, cluster.request(PROMPT, **FOUR))
        await until(lambda: reached(cluster) and len(running.answer.samples) == 4)
        second = cluster.prefills[-1]
        if way == "local":
            gate_decode(cluster)
        elif way == "prefill":
            second.device.gate = threading.Event()
        configure_failpoints("" if way in ("local", "prefill") else f"{way}=delay:30")
        await cluster.prefills[0].kill()
        if way == "local":
            await until(cluster.decode.device.entered.is_set)
        elif way == "reserve":
            await until(lambda: cluster.decode.engine.load().num_in_handover == 0)
        elif way == "prefill":
            await until(second.device.entered.is_set)
        elif way == "prefill.queue":
            await until(lambda: second.server.num_active_rpcs == 1)
        else:
            await until(lambda: second.engine.load().num_in_handover == 1)
        running.call.cancel()
        await asyncio.wait({running.task})
        assert running.task.cancelled()
        configure_failpoints("")
        open_gates(cluster)
        await cluster.assert_nothing_held()
        assert (await cluster.generate(cluster.request(PROMPT, prefill="", **FOUR))).streams == alone_streams(PROMPT, **FOUR)


async def test_an_engine_that_dies_under_samples_on_their_own_ends_them_all() -> None:
    async with open_cluster(num_prefills=2) as cluster:
        cluster.prefills[1].device.fail_next = RuntimeError("device lost")
        cluster.decode.device.fail_next = RuntimeError("device lost")
        running = await _lose_prefill(cluster, "kv.hold", FOUR)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asyncio.wait_for(running.task, 10)
        assert StatusError.of(failed.value).reason == "ENGINE_DEAD"
        await cluster.assert_nothing_held()
