"""A prompt computed in one pool and decoded in another gives what one engine alone gives."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from rpc.errors import StatusError
from tandem.v1 import decode_pb2, generation_pb2
from tests.support.alone import alone
from tests.support.cluster import open_cluster
from tests.support.engines import FAKE_EOS

PROMPT = list(range(100, 130))
LENGTH, STOP = generation_pb2.FINISH_REASON_LENGTH, generation_pb2.FINISH_REASON_STOP


@pytest.mark.parametrize("transport", ["memory", "inline"])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 30, 64])
async def test_handed_over_equals_one_engine(transport: str, num_tokens: int) -> None:
    prompt = list(range(200, 200 + num_tokens))
    async with open_cluster(transports=[transport]) as cluster:
        answer = await cluster.generate(cluster.request(prompt))
        assert answer.token_ids == alone(prompt)
        assert answer.finish_reason == LENGTH
        (report,) = answer.prompts
        assert (report.path, report.prefill_instance, report.num_failed_attempts) == (decode_pb2.PROMPT_PATH_HANDOVER, "p0", 0)
        assert (answer.handover.transport, answer.handover.num_blocks) == (transport, -(-num_tokens // 4))
        assert answer.handover.kv_bytes == answer.handover.num_blocks * 128
        assert (await cluster.decode.engine.report()).computed_prompt_tokens == 0
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("params", [{"temperature": 0.8, "seed": 5}, {"logprobs": 2}, {"max_tokens": 40}, {"max_tokens": 2}])
async def test_parameters_travel(params: dict[str, Any]) -> None:
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, **params))
        assert answer.token_ids == alone(PROMPT, **params)
        with_logprobs = [logprob.token_id for message in answer.messages for logprob in message.logprobs]
        assert with_logprobs == (answer.token_ids if "logprobs" in params else [])


async def test_many_at_once_with_shared_prefixes_equal_one_engine() -> None:
    prompts = [[*range(100, 112 + n % 3), 500 + n] for n in range(12)]
    async with open_cluster(transports=["memory", "inline"], prefill_options={"num_blocks": 40}, decode_options={"num_blocks": 128}) as cluster:
        for _ in range(2):
            answers = await asyncio.gather(*(_retrying(cluster, prompt) for prompt in prompts))
            assert [answer.token_ids for answer in answers] == [alone(prompt) for prompt in prompts]
        assert any(answer.reservation.cached_tokens for answer in answers)
        assert any(answer.prompts[0].cached_tokens for answer in answers)
        assert (await cluster.decode.engine.report()).computed_prompt_tokens == 0
        await cluster.assert_nothing_held()


async def _retrying(cluster: Any, prompt: list[int]) -> Any:
    """The fake decode engine takes eight sequences: the gateway's part here is to come back."""
    while True:
        try:
            return await cluster.generate(cluster.request(prompt))
        except grpc.aio.AioRpcError as error:
            if StatusError.of(error).reason != "NO_SEQUENCE_SLOT":
                raise
            await asyncio.sleep(0.01)


async def test_a_prompt_that_decode_has_whole_moves_no_block() -> None:
    prompt = PROMPT[:20]
    async with open_cluster() as cluster:
        first = await cluster.generate(cluster.request(prompt))
        again = await cluster.generate(cluster.request(prompt))
        assert again.token_ids == first.token_ids == alone(prompt)
        assert (again.handover.kv_bytes, again.reservation.cached_tokens) == (0, 20)
        await cluster.assert_nothing_held()


async def test_one_token_reserves_and_copies_nothing() -> None:
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, max_tokens=1))
        assert answer.token_ids == alone(PROMPT, max_tokens=1)
        assert answer.finish_reason == LENGTH
        assert answer.prompts[0].path == decode_pb2.PROMPT_PATH_PREFILL_ONLY
        assert (answer.reservation.num_blocks, answer.handover.kv_bytes) == (0, 0)
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("prefill", ["p0", ""])
async def test_no_token_computes_the_prompt_and_ends_with_length(prefill: str) -> None:
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, prefill=prefill, max_tokens=0))
        assert (answer.token_ids, answer.finish_reason) == ([], LENGTH)
        assert len(answer.prompts) == 1
        engine = cluster.prefills[0].engine if prefill else cluster.decode.engine
        assert (await engine.report()).computed_prompt_tokens == len(PROMPT)
        await cluster.assert_nothing_held()


async def test_a_first_token_that_ends_the_sequence_drops_the_reservation() -> None:
    first = alone(PROMPT)[0]
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, stop_token_ids=frozenset({first})))
        assert answer.token_ids == [first]
        assert answer.finish_reason == STOP
        assert answer.messages[-1].finish.matched_token_id == first
        await cluster.assert_nothing_held()


async def test_a_later_stop_token_ends_the_stream() -> None:
    tokens = alone(PROMPT)
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, stop_token_ids=frozenset({tokens[3]})))
        assert answer.token_ids == tokens[: tokens.index(tokens[3]) + 1]
        assert answer.finish_reason == STOP
        assert FAKE_EOS not in tokens
        await cluster.assert_nothing_held()


async def test_decode_alone_serves_and_says_so() -> None:
    async with open_cluster(num_prefills=0) as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, prefill=""))
        assert answer.token_ids == alone(PROMPT)
        assert answer.prompts[0].path == decode_pb2.PROMPT_PATH_LOCAL
        assert answer.reservation.num_blocks == -(-(len(PROMPT) + 8) // 4)
        assert answer.handover.transport == ""
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("prefill", ["p0", ""])
async def test_cached_blocks_that_nobody_held_are_charged(prefill: str) -> None:
    async with open_cluster() as cluster:
        for cached_tokens in (0, 28):
            reservation = (await cluster.generate(cluster.request(PROMPT, prefill=prefill))).reservation
            assert (reservation.num_blocks, reservation.num_charged_blocks, reservation.cached_tokens) == (10, 10, cached_tokens)


@pytest.mark.parametrize("prefill", ["p0", ""])
async def test_a_resume_goes_on_behind_the_tokens_sent(prefill: str) -> None:
    tokens = alone(PROMPT, temperature=0.7, seed=3)
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, prefill=prefill, output=tokens[:5], temperature=0.7, seed=3))
        assert answer.first_position == 5
        assert answer.token_ids == tokens[5:]
        await cluster.assert_nothing_held()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt_token_ids"),
    ({"prompt": [1000]}, "prompt_token_ids"),
    ({"prompt": [1] * 128}, "prompt_token_ids"),
    ({"prompt": [1], "output": [2] * 8}, "output_token_ids"),
    ({"prompt": [1], "temperature": 3.0}, "sampling_params.temperature"),
    ({"prompt": [1], "stop_token_ids": frozenset({1000})}, "sampling_params.stop_token_ids"),
]


@pytest.mark.parametrize("prefill", ["p0", ""])
@pytest.mark.parametrize(("arguments", "field"), BAD)
async def test_bad_requests_are_refused_by_field(prefill: str, arguments: dict[str, Any], field: str) -> None:
    async with open_cluster() as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(cluster.request(**arguments, prefill=prefill))
        status = StatusError.of(refused.value)
        assert (status.code, status.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        await cluster.assert_nothing_held()


async def test_an_unknown_prefill_instance_is_a_failed_precondition() -> None:
    async with open_cluster() as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(cluster.request(PROMPT, prefill="127.0.0.1:1"))
        assert (refused.value.code(), StatusError.of(refused.value).reason) == (grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_INSTANCE")


async def test_a_pool_without_room_refuses_before_prefill_is_asked() -> None:
    async with open_cluster(decode_options={"num_blocks": 10}) as cluster:
        call = cluster.decode.stub.Generate(cluster.request(PROMPT, max_tokens=8))
        assert (await call.read()).HasField("reservation")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(cluster.request(PROMPT[1:]))
        status = StatusError.of(refused.value)
        assert (status.code, status.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_KV_BLOCKS")
        assert status.retry_after_s
        call.cancel()
        await cluster.assert_nothing_held()
