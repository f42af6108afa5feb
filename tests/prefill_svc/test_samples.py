"""First tokens of several samples, and log probabilities of the prompt, as decode gets them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from engine.limits import EngineLimits
from engine.proto import sampling_params_to_proto
from rpc.errors import StatusError
from tandem.v1 import prefill_pb2
from tests.support.alone import alone_prompt_logprobs, alone_streams, sampling_of
from tests.support.cluster import PrefillNode, open_prefill
from tests.support.held import assert_nothing_held
from tests.support.pair_call import paired

PROMPT = list(range(100, 130))
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 5}


@pytest.fixture
async def node() -> AsyncIterator[PrefillNode]:
    async with open_prefill("p0") as opened, paired(opened) as offer:
        opened.pairing_id = offer.pairing_id
        yield opened
        await assert_nothing_held(opened.engine)


def _start(node: PrefillNode, *, transport: str = "", output: tuple[int, ...] = (), **params: Any) -> prefill_pb2.PrefillRequest:
    sampling = sampling_of(params)
    return prefill_pb2.PrefillRequest(
        start=prefill_pb2.PrefillStart(
            request_id="r",
            pairing_id=node.pairing_id,
            prompt_token_ids=PROMPT,
            output_token_ids=output,
            sampling_params=sampling_params_to_proto(sampling),
            sample_index=sampling.sample_index,
            transport=transport,
        )
    )


async def _answers(node: PrefillNode, request: prefill_pb2.PrefillRequest) -> list[prefill_pb2.PrefillResponse]:
    """All messages up to PrefillDone."""
    call = node.stub.Prefill(timeout=20)
    await call.write(request)
    answers: list[prefill_pb2.PrefillResponse] = []
    while not answers or not answers[-1].HasField("done"):
        answers.append(await call.read())
    call.cancel()
    return answers


@pytest.mark.parametrize("transport", ["", "inline"])
async def test_a_first_token_comes_for_each_sample_in_their_order(node: PrefillNode, transport: str) -> None:
    done = (await _answers(node, _start(node, transport=transport, n=4, **WARM)))[-1].done
    assert [first.token_id for first in done.first_tokens] == [stream[0] for stream in alone_streams(PROMPT, n=4, **WARM)]
    assert done.computed_tokens == len(PROMPT)
    assert done.num_blocks == (8 if transport else 0)


async def test_the_sample_index_says_whose_noise_it_is(node: PrefillNode) -> None:
    done = (await _answers(node, _start(node, sample_index=2, **WARM)))[-1].done
    assert [first.token_id for first in done.first_tokens] == [alone_streams(PROMPT, n=3, **WARM)[2][0]]


@pytest.mark.parametrize("n", [1, 4])
async def test_without_a_token_the_prompt_is_computed_once_and_none_comes(node: PrefillNode, n: int) -> None:
    done = (await _answers(node, _start(node, n=n, max_tokens=0)))[-1].done
    assert (list(done.first_tokens), done.computed_tokens) == ([], len(PROMPT))


@pytest.mark.parametrize("max_tokens", [0, 1, 8])
async def test_log_probabilities_of_the_prompt_come_before_done_whatever_is_cached(node: PrefillNode, max_tokens: int) -> None:
    for _ in range(2):
        answers = await _answers(node, _start(node, n=2, max_tokens=max_tokens, prompt_logprobs=2, **WARM))
        entries = [entry for answer in answers for entry in answer.prompt_logprobs.logprobs]
        assert entries == alone_prompt_logprobs(PROMPT, n=2, max_tokens=max_tokens, prompt_logprobs=2, **WARM)
        assert answers[-1].done.cached_tokens == 0
        await assert_nothing_held(node.engine)


async def test_a_resume_has_no_log_probabilities_of_the_prompt(node: PrefillNode) -> None:
    answers = await _answers(node, _start(node, output=(5, 6), prompt_logprobs=2))
    assert [answer.WhichOneof("step") for answer in answers] == ["done"]


async def test_several_samples_have_no_output_in_common(node: PrefillNode) -> None:
    call = node.stub.Prefill(timeout=20)
    await call.write(_start(node, output=(5, 6), n=2))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert StatusError.of(refused.value).field == "output_token_ids"


async def test_a_long_run_of_log_probabilities_comes_in_bounded_messages() -> None:
    prompt = [100 + number % 800 for number in range(600)]
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=1024, max_prefill_tokens_per_step=1024)
    async with open_prefill("p0", num_blocks=256, max_model_len=1024, limits=limits) as node, paired(node) as offer:
        node.pairing_id = offer.pairing_id
        request = _start(node, prompt_logprobs=0)
        request.start.prompt_token_ids[:] = prompt
        sizes = [len(answer.prompt_logprobs.logprobs) for answer in (await _answers(node, request))[:-1]]
        assert sizes == [256, 256, 87]
