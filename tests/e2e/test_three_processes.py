"""A request through gateway, prefill and decode is the single engine's, token for token."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from checks.tiny_models import VOCAB_SIZE
from tandem.v1 import gateway_pb2, generation_pb2
from telemetry import spans
from telemetry.receiver import OtlpReceiver, ReceivedSpan
from tests.support.live_request import LiveRequest, request_of
from tests.support.live_stack import LiveStack
from tests.support.reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")
LENGTH, STOP = generation_pb2.FINISH_REASON_LENGTH, generation_pb2.FINISH_REASON_STOP
GATEWAY, DECODE, PREFILL = "tandem.v1.GatewayService/Generate", "tandem.v1.DecodeService/Generate", "tandem.v1.PrefillService/Prefill"
_BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4
"""K and V of 3 layers, 2 heads of 16 elements, 16 tokens, in float32."""


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Ordinary tokens; prompts of two seeds have no common prefix worth a block."""
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 40, "min_p": 0.01}], ids=["greedy", "sampled"])
async def test_a_prompt_is_handed_over_and_goes_on_as_in_one_engine(stack: LiveStack, reference: Reference, num_tokens: int, params: dict[str, float]) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens + len(params))
    request = await stack.ask(prompt, max_tokens=20, **params).ended()
    assert request.outcome == ("OK", "")
    assert request.token_ids == await reference.tokens(prompt, max_tokens=20, **params)
    assert request.finish.finish_reason == LENGTH
    usage = request.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens) == (num_tokens, 20, num_tokens + 20, 0)
    assert request.trailers == {
        "tandem-request-id": request.request_id,
        "tandem-path": "handover",
        "tandem-decode-instance": "decode-0",
        "tandem-prefill-instance": "prefill-0",
        "tandem-kv-transport": "shared_memory",
        "tandem-kv-bytes": str(-(-num_tokens // 16) * _BLOCK_BYTES),
        "tandem-tokens-sent": "20",
    }


async def test_requests_side_by_side_do_not_change_each_other(stack: LiveStack, reference: Reference) -> None:
    asked = [(prompt_of(5 + 23 * index, seed=100 + index), {"temperature": index % 2 * 0.8, "seed": index, "max_tokens": 4 + index}) for index in range(12)]
    running = [stack.ask(prompt, **params) for prompt, params in asked]
    for (prompt, params), request in zip(asked, running, strict=True):
        await request.ended()
        assert (request.outcome, request.token_ids) == (("OK", ""), await reference.tokens(prompt, **params))


async def test_a_common_prefix_is_computed_once_and_changes_nothing(stack: LiveStack, reference: Reference) -> None:
    prefix = prompt_of(64, seed=200)
    first, second = [*prefix, 50, 51, 52], [*prefix, 60, 61]
    await stack.ask(first).ended()
    computed = (await stack.memory("prefill-0")).computed_prompt_tokens
    request = await stack.ask(second, max_tokens=12).ended()
    assert request.token_ids == await reference.tokens(second, max_tokens=12)
    assert request.usage.cached_tokens == 64
    assert (await stack.memory("prefill-0")).computed_prompt_tokens == computed + 2
    assert (await stack.memory("decode-0")).computed_prompt_tokens == 0
    assert int(request.trailers["tandem-kv-bytes"]) == _BLOCK_BYTES, "decode has the four blocks of the prefix already"


@pytest.mark.parametrize("n", [1, 3])
async def test_parameters_that_leave_no_token_are_the_clients_own_mistake_before_and_behind_the_first(stack: LiveStack, n: int) -> None:
    runs = [[5, 5], [5, 6], [6, 5], [6, 6]]
    for bad_words_ids, sent in (([[5], [6]], []), (runs, [[5], [6]])):
        bad = [generation_pb2.TokenIds(ids=run) for run in bad_words_ids]
        request = await stack.ask(prompt_of(40, seed=350), allowed_token_ids=[5, 6], bad_words_ids=bad, n=n).ended()
        assert request.outcome == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
        assert request.status is not None
        assert (request.status.field, "leave no token" in request.status.message) == ("sampling_params", True)
        assert all(tokens in sent for tokens in request.samples.values() if tokens)
    await stack.assert_nothing_held()


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_at_most_one_token_needs_no_kv(stack: LiveStack, reference: Reference, max_tokens: int) -> None:
    prompt = prompt_of(40, seed=300 + max_tokens)
    request = await stack.ask(prompt, max_tokens=max_tokens, temperature=0.7).ended()
    assert request.outcome == ("OK", "")
    assert request.token_ids == (await reference.tokens(prompt, max_tokens=1, temperature=0.7))[:max_tokens]
    assert (request.finish.finish_reason, request.usage.completion_tokens) == (LENGTH, max_tokens)
    assert request.trailers["tandem-path"] == "prefill_only"
    assert request.trailers.get("tandem-kv-bytes", "0") == "0"


async def test_two_tokens_are_two_tokens(stack: LiveStack, reference: Reference) -> None:
    prompt = prompt_of(40, seed=310)
    request = await stack.ask(prompt, max_tokens=2).ended()
    assert request.token_ids == await reference.tokens(prompt, max_tokens=2)
    assert (request.finish.finish_reason, request.trailers["tandem-path"]) == (LENGTH, "handover")


@pytest.mark.parametrize("position", [0, 3])
async def test_a_stop_token_ends_the_sequence_wherever_it_comes(stack: LiveStack, reference: Reference, position: int) -> None:
    prompt = prompt_of(33, seed=320)
    expected = await reference.tokens(prompt, max_tokens=10)
    position = next(index for index, token in enumerate(expected) if index >= position and token not in expected[:index])
    request = await stack.ask(prompt, max_tokens=10, stop_token_ids=[expected[position]]).ended()
    assert request.token_ids == expected[: position + 1]
    assert (request.finish.finish_reason, request.finish.matched_token_id) == (STOP, expected[position])


async def test_a_stop_string_cuts_the_text_and_ends_decode(stack: LiveStack, served_model: Path) -> None:
    prompt = prompt_of(33, seed=330)
    whole = await stack.ask(prompt, max_tokens=60).ended()
    assert whole.text == Tokenizer.from_file(str(served_model / "tokenizer.json")).decode(whole.token_ids)
    stop = next(piece for piece in (whole.text[at : at + 4] for at in range(8, len(whole.text))) if "\ufffd" not in piece)
    request = await stack.ask(prompt, max_tokens=60, stop=[stop]).ended()
    assert request.outcome == ("OK", "")
    assert request.text == whole.text[: whole.text.index(stop)]
    assert (request.finish.finish_reason, request.finish.matched_stop_str) == (STOP, stop)
    assert request.token_ids == whole.token_ids[: len(request.token_ids)] and len(request.token_ids) < 60
    assert request.usage.completion_tokens == len(request.token_ids)
    await stack.assert_nothing_held()


async def test_log_probabilities_come_with_every_token_and_the_first(stack: LiveStack, reference: Reference) -> None:
    prompt = prompt_of(50, seed=340)
    params = {"max_tokens": 6, "logprobs": 3, "temperature": 0.8}
    request = await stack.ask(prompt, **params).ended()
    expected = await reference.sampled(prompt, **params)
    assert [found.token_id for found in request.logprobs] == request.token_ids == [token.token_id for token in expected]
    assert [found.logprob for found in request.logprobs] == pytest.approx([token.logprob for token in expected], abs=1e-5)
    assert [[top.token_id for top in found.top_logprobs] for found in request.logprobs] == [[top[0] for top in token.top_logprobs] for token in expected]


async def test_a_chat_is_templated_tokenized_once_and_answered_in_text(stack: LiveStack, reference: Reference, served_model: Path) -> None:
    messages = [gateway_pb2.ChatMessage(role="user", content="What is the capital of France?")]
    sampling = generation_pb2.SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    chat = gateway_pb2.GenerateRequest(request_id="a-chat", chat=gateway_pb2.ChatMessages(messages=messages), sampling_params=sampling)
    request = await LiveRequest(stack.gateway, chat, 30).ended()
    tokenizer = Tokenizer.from_file(str(served_model / "tokenizer.json"))
    prompt = [1, *tokenizer.encode("user: What is the capital of France?\nassistant: ", add_special_tokens=False).ids]
    assert request.token_ids == await reference.tokens(prompt, max_tokens=12, temperature=0.9, seed=3)
    assert request.text == tokenizer.decode(request.token_ids)
    assert (request.usage.prompt_tokens, request.trailers["tandem-path"]) == (len(prompt), "handover")


async def test_a_unary_request_is_the_same_request(stack: LiveStack, reference: Reference) -> None:
    prompt = prompt_of(20, seed=350)
    response = await stack.gateway.GenerateUnary(gateway_pb2.GenerateUnaryRequest(request=request_of(prompt)), timeout=30)
    assert list(response.choices[0].token_ids) == await reference.tokens(prompt)
    assert response.usage.total_tokens == 28


async def test_a_drawn_seed_is_told_and_repeats_the_completion(stack: LiveStack) -> None:
    request = request_of(prompt_of(20, seed=360), temperature=1.5, max_tokens=16)
    request.sampling_params.ClearField("seed")
    messages = [message async for message in stack.gateway.Generate(request, timeout=30)]
    tokens = [token for message in messages for token in message.token_ids]
    assert messages[0].HasField("seed")
    again = await stack.ask(request.token_ids.ids, temperature=1.5, max_tokens=16, seed=messages[0].seed).ended()
    assert again.token_ids == tokens


async def test_a_resume_goes_on_behind_the_tokens_that_were_sent(stack: LiveStack, reference: Reference) -> None:
    prompt = prompt_of(30, seed=370)
    expected = await reference.tokens(prompt, max_tokens=12, temperature=0.8)
    request = request_of(prompt, max_tokens=12, temperature=0.8)
    request.output_token_ids.extend(expected[:5])
    messages = [message async for message in stack.gateway.Generate(request, timeout=30)]
    assert [token for message in messages for token in message.token_ids] == expected[5:]
    assert messages[0].position == 5
    assert messages[-1].usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"n": 17}, "sampling_params.n"),
        ({"temperature": -1.0}, "sampling_params.temperature"),
        ({"max_tokens": 50000}, "sampling_params.max_tokens"),
        ({"min_tokens": 20, "max_tokens": 2}, "sampling_params.min_tokens"),
        ({"repetition_penalty": 0.0}, "sampling_params.repetition_penalty"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(stack: LiveStack, params: dict[str, float], field: str) -> None:
    request = await stack.ask([5, 6, 7], **params).ended()
    assert request.code is grpc.StatusCode.INVALID_ARGUMENT
    assert request.status is not None and request.status.field == field


async def test_an_id_that_is_in_flight_is_refused_and_free_again_afterwards(stack: LiveStack) -> None:
    running = stack.ask(prompt_of(20, seed=380), max_tokens=400, request_id="twice")
    await running.tokens(1)
    second = await stack.ask([5], request_id="twice").ended()
    assert second.outcome == ("ALREADY_EXISTS", "ALREADY_EXISTS")
    running.cancel()
    await running.ended()
    await stack.assert_nothing_held()
    assert (await stack.ask([5], request_id="twice").ended()).outcome == ("OK", "")


async def test_status_tells_of_both_pools_and_of_what_runs(stack: LiveStack) -> None:
    await stack.assert_nothing_held()
    running = stack.ask(prompt_of(20, seed=390), max_tokens=400)
    await running.tokens(1)
    status = await stack.status()
    assert (status.num_requests_running, status.num_requests_waiting, status.draining) == (1, 0, False)
    assert {(each.name, each.role, each.available) for each in status.instances} == {
        ("prefill-0", gateway_pb2.INSTANCE_ROLE_PREFILL, True),
        ("decode-0", gateway_pb2.INSTANCE_ROLE_DECODE, True),
    }
    assert {each.load.num_blocks for each in status.instances} == {512}
    running.cancel()
    await running.ended()


async def test_one_trace_spans_all_services_with_the_right_parents(stack: LiveStack, receiver: OtlpReceiver) -> None:
    request = await stack.ask(prompt_of(40, seed=400), request_id="traced").ended()
    assert request.outcome == ("OK", "")
    trace = await _trace_of(receiver, "traced")
    by_name = {(span.kind, span.name): span for span in trace}
    assert len(by_name) == len(trace)
    root = by_name["SERVER", GATEWAY]
    to_decode, decode = by_name["CLIENT", DECODE], by_name["SERVER", DECODE]
    to_prefill, prefill = by_name["CLIENT", PREFILL], by_name["SERVER", PREFILL]
    parents = {
        root.span_id: "",
        to_decode.span_id: root.span_id,
        decode.span_id: to_decode.span_id,
        to_prefill.span_id: decode.span_id,
        prefill.span_id: to_prefill.span_id,
        **{by_name["INTERNAL", name].span_id: root.span_id for name in (spans.TOKENIZE, spans.QUEUE, spans.ROUTE)},
        **{by_name["INTERNAL", name].span_id: decode.span_id for name in (spans.RESERVE, spans.KV_TRANSFER, spans.DECODE)},
        **{by_name["INTERNAL", name].span_id: prefill.span_id for name in (spans.PREFILL_QUEUE, spans.PREFILL, spans.KV_HOLD)},
    }
    assert {span.span_id: span.parent_id for span in trace} == parents
    assert {(span.service, span.instance) for span in trace} == {("gateway", "gateway"), ("decode", "decode-0"), ("prefill", "prefill-0")}
    assert not any(span.status == "ERROR" for span in trace)


async def _trace_of(receiver: OtlpReceiver, request_id: str) -> tuple[ReceivedSpan, ...]:
    """The trace once all its segments have arrived."""

    def trace_id(received: tuple[ReceivedSpan, ...]) -> str | None:
        return next((span.trace_id for span in received if span.name == GATEWAY and span.attributes.get(spans.REQUEST_ID) == request_id), None)

    rpcs = {("SERVER", GATEWAY), ("CLIENT", DECODE), ("SERVER", DECODE), ("CLIENT", PREFILL), ("SERVER", PREFILL)}

    def whole(received: tuple[ReceivedSpan, ...]) -> bool:
        found = trace_id(received)
        return {("INTERNAL", name) for name in spans.SEGMENTS} | rpcs <= {(span.kind, span.name) for span in received if span.trace_id == found}

    found = trace_id(await receiver.wait_for(whole))
    assert found is not None
    return receiver.trace(found)


async def test_a_slow_reader_does_not_slow_the_others(stack: LiveStack) -> None:
    slow = stack.gateway.Generate(request_of(prompt_of(20, seed=410), max_tokens=2000), timeout=60)
    await slow.read()
    quick = await asyncio.gather(*(stack.ask(prompt_of(20, seed=411 + index)).ended() for index in range(3)))
    assert [request.outcome for request in quick] == [("OK", "")] * 3
    slow.cancel()
    await stack.assert_nothing_held()
