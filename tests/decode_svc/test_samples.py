"""Several samples of one prompt through the split equal one engine; the prompt is computed and copied once."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from rpc.errors import StatusError
from tandem.v1 import decode_pb2, generation_pb2
from tests.support.alone import alone, alone_prompt_logprobs, alone_streams
from tests.support.cluster import open_cluster

PROMPT = list(range(100, 130))
LENGTH, STOP = generation_pb2.FINISH_REASON_LENGTH, generation_pb2.FINISH_REASON_STOP
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 5}


@pytest.mark.parametrize("transport", ["memory", "inline"])
@pytest.mark.parametrize("n", [1, 2, 4])
async def test_samples_of_prompts_of_every_length_in_a_block_equal_one_engine(n: int, transport: str) -> None:
    async with open_cluster(transports=[transport]) as cluster:
        for num_tokens in (1, 4, 5, 6, 7, 8, 29):
            prompt = list(range(200 + 50 * num_tokens % 700, 200 + 50 * num_tokens % 700 + num_tokens))
            answer = await cluster.generate(cluster.request(prompt, n=n, **WARM))
            assert answer.streams == alone_streams(prompt, n=n, **WARM)
            assert len({tuple(stream) for stream in answer.streams}) == n
            assert (answer.handover.transport, answer.handover.num_blocks) == (transport, -(-num_tokens // 4))
            assert len(answer.prompts) == 1
            await cluster.assert_nothing_held()
        assert (await cluster.decode.engine.report()).computed_prompt_tokens == 0


@pytest.mark.parametrize("prefill", ["p0", ""])
async def test_a_sample_index_moves_all_samples_along(prefill: str) -> None:
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, prefill=prefill, n=2, sample_index=3, **WARM))
        assert answer.streams == alone_streams(PROMPT, n=5, **WARM)[3:]


@pytest.mark.parametrize("prefill", ["p0", ""])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3])
async def test_counts_are_exact_and_at_most_one_token_takes_nothing_from_decode(prefill: str, n: int, max_tokens: int) -> None:
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, prefill=prefill, n=n, max_tokens=max_tokens, **WARM))
        assert answer.streams == alone_streams(PROMPT, n=n, max_tokens=max_tokens, **WARM)
        assert [len(stream) for stream in answer.streams] == [max_tokens] * n
        assert {finish.finish_reason for finish in answer.finishes.values()} == {LENGTH}
        assert len(answer.prompts) == 1
        if prefill and max_tokens <= 1:
            assert answer.prompts[0].path == decode_pb2.PROMPT_PATH_PREFILL_ONLY
            assert (answer.reservation.num_blocks, answer.handover.kv_bytes) == (0, 0)
            report = await cluster.decode.engine.report()
            assert (report.num_steps, report.num_free_blocks, report.num_cached_blocks) == (0, report.num_blocks, 0)
        await cluster.assert_nothing_held()


async def test_first_tokens_that_end_some_samples_leave_the_others_going() -> None:
    streams = alone_streams(PROMPT, n=4, **WARM)
    stops = frozenset({streams[0][0], streams[2][0]})
    expected = alone_streams(PROMPT, n=4, stop_token_ids=stops, **WARM)
    assert sorted(map(len, expected))[:2] == [1, 1] and max(map(len, expected)) > 1
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, n=4, stop_token_ids=stops, **WARM))
        assert answer.streams == expected
        assert [answer.finishes[index].matched_token_id for index in (0, 2)] == [streams[0][0], streams[2][0]]
        assert answer.handover.num_blocks == 8
        await cluster.assert_nothing_held()


async def test_first_tokens_that_end_every_sample_drop_the_hand_over() -> None:
    stops = frozenset(stream[0] for stream in alone_streams(PROMPT, n=4, **WARM))
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, n=4, stop_token_ids=stops, **WARM))
        assert answer.streams == alone_streams(PROMPT, n=4, stop_token_ids=stops, **WARM)
        assert {finish.finish_reason for finish in answer.finishes.values()} == {STOP}
        assert answer.handover.kv_bytes == 0
        assert (await cluster.decode.engine.report()).num_steps == 0
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("prefill", ["p0", ""])
async def test_a_stop_token_within_min_tokens_ends_no_sample(prefill: str) -> None:
    """The fake device samples it all the same: both pools must agree that it does not end a sample there."""
    streams = alone_streams(PROMPT, n=2, **WARM)
    params = {"n": 2, "stop_token_ids": frozenset({streams[0][0], streams[1][2]}), "min_tokens": 3, **WARM}
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, prefill=prefill, **params))
        assert answer.streams == alone_streams(PROMPT, **params)
        assert all(len(stream) > 3 for stream in answer.streams)
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("prefill", ["p0", ""])
@pytest.mark.parametrize(("n", "max_tokens"), [(1, 8), (4, 8), (1, 0), (4, 1)])
async def test_prompt_log_probabilities_are_told_once_and_equal_one_engine(prefill: str, n: int, max_tokens: int) -> None:
    params = {"n": n, "max_tokens": max_tokens, "prompt_logprobs": 2, "logprobs": 1, **WARM}
    async with open_cluster() as cluster:
        for _ in range(2):  # the second time everything is cached, and computed all the same
            answer = await cluster.generate(cluster.request(PROMPT, prefill=prefill, **params))
            assert answer.streams == alone_streams(PROMPT, **params)
            assert [entry.token_id for entry in answer.prompt_logprobs] == PROMPT[1:]
            assert answer.prompt_logprobs == alone_prompt_logprobs(PROMPT, **params)
            assert all(len(entry.top_logprobs) == 2 for entry in answer.prompt_logprobs)
            assert answer.prompts[0].cached_tokens == 0
            await cluster.assert_nothing_held()


@pytest.mark.parametrize("prefill", ["p0", ""])
async def test_a_long_prompt_s_log_probabilities_come_in_bounded_messages(prefill: str) -> None:
    prompt = [100 + number % 800 for number in range(600)]
    options: dict[str, Any] = {"num_blocks": 256, "max_model_len": 1024}
    async with open_cluster(prefill_options=options, decode_options=options) as cluster:
        answer = await cluster.generate(cluster.request(prompt, prefill=prefill, prompt_logprobs=0))
        assert [entry.token_id for entry in answer.prompt_logprobs] == prompt[1:]
        if prefill:
            assert [len(message.prompt_logprobs) for message in answer.messages if message.prompt_logprobs] == [256, 256, 87]


@pytest.mark.parametrize("prefill", ["p0", ""])
@pytest.mark.parametrize("num_tokens", [1, 2])
async def test_the_shortest_prompts_have_no_or_one_log_probability(prefill: str, num_tokens: int) -> None:
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT[:num_tokens], prefill=prefill, prompt_logprobs=0))
        assert [entry.token_id for entry in answer.prompt_logprobs] == PROMPT[1:num_tokens]
        assert answer.token_ids == alone(PROMPT[:num_tokens])


@pytest.mark.parametrize("prefill", ["p0", ""])
async def test_a_resume_tells_no_log_probabilities_of_the_prompt(prefill: str) -> None:
    tokens = alone(PROMPT)
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, prefill=prefill, output=tokens[:3], prompt_logprobs=1))
        assert (answer.prompt_logprobs, answer.token_ids) == ([], tokens[3:])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 2, "output": [5]}, "output_token_ids"),
    ({"n": 17}, "sampling_params.n"),
    ({"n": 9}, "sampling_params.n"),
]


@pytest.mark.parametrize("prefill", ["p0", ""])
@pytest.mark.parametrize(("arguments", "field"), BAD)
async def test_samples_that_cannot_be_are_refused_by_field(prefill: str, arguments: dict[str, Any], field: str) -> None:
    async with open_cluster() as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(cluster.request(PROMPT, prefill=prefill, **arguments))
        status = StatusError.of(refused.value)
        assert (status.code, status.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        await cluster.assert_nothing_held()


async def test_samples_take_what_admission_forecast() -> None:
    """ceil(P/K) + (n-1) [P mod K > 0] + n (ceil((P+out)/K) - ceil(P/K)) with P = 30, K = 4, out = 8 and n = 4."""
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT, n=4, **WARM))
        assert answer.reservation.num_charged_blocks == 8 + 3 + 4 * (10 - 8)
