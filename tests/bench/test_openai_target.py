"""The OpenAI target over real HTTP, against a server that sends what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.metrics_page import sample_of
from bench.openai_target import Endpoint, OpenAIOptions, OpenAITarget
from bench.plan import Plan
from bench.record import Outcome, Record
from bench.runner import RunLimits, Runner
from bench.target import TargetError
from tests.bench.scripted import (
    DONE,
    WAIT_S,
    Asked,
    HttpScript,
    ScriptedHttp,
    answer_http,
    closed_plan,
    event,
    plan_of_times,
    scripted_http,
    send_stream,
    send_whole,
    text_event,
    usage_of,
    whole_stream,
)


@asynccontextmanager
async def opened(url: str, options: OpenAIOptions | None = None) -> AsyncIterator[OpenAITarget]:
    target = OpenAITarget(url, options)
    try:
        await target.open()
        yield target
    finally:
        await target.close()


async def run_against(
    script: HttpScript, plan: Plan | None = None, *, options: OpenAIOptions | None = None, limits: RunLimits | None = None
) -> tuple[tuple[Record, ...], ScriptedHttp]:
    async with scripted_http(script) as peer, opened(f"{peer.url}/v1/", options) as target:
        measured = await asyncio.wait_for(Runner(plan or plan_of_times(0.0), target, limits, cold_start=False).run(), WAIT_S)
        return measured.records, peer


def sends(*pieces: bytes | float) -> HttpScript:
    """The same to everybody."""

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await send_stream(writer, pieces)

    return script


async def test_a_request_goes_out_in_tokens_with_the_fields_of_vllm() -> None:
    (record,), peer = await run_against(answer_http)
    assert record.outcome is Outcome.OK, record.error
    assert [each.num_tokens for each in record.arrived] == [1, 1, 1] and record.counted_by == "usage"
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens, record.finish_reason) == (3, 3, 1, "length")
    (asked,) = peer.asked
    assert asked.path == "/v1/completions"
    assert asked.body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": 3,
        "ignore_eos": True,
        "min_tokens": 3,
        "skip_special_tokens": False,
        "prompt": [0, 7, 8],
    }


async def test_fields_that_a_server_refuses_can_be_left_out_and_others_added() -> None:
    options = OpenAIOptions(ignore_eos=False, continuous_usage=False, headers={"Authorization": "Bearer k"}, extra_body={"top_k": 1})
    _, peer = await run_against(answer_http, options=options)
    (asked,) = peer.asked
    assert not {"ignore_eos", "min_tokens", "skip_special_tokens"} & set(asked.body) and asked.body["stream_options"] == {"include_usage": True}
    assert asked.body["top_k"] == 1 and asked.headers["authorization"] == "Bearer k"


async def test_chat_goes_out_as_text_and_counts_what_the_server_counts() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None})
    deltas = [event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None}) for text in ("a", "b", "c")]
    last = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": None})
    options = OpenAIOptions(endpoint=Endpoint.CHAT, detokenize=lambda ids: " ".join(map(str, ids)))
    script = sends(role, *deltas, last, event({"choices": [], "usage": usage_of(3) | {"prompt_tokens": 11}}), DONE)
    (record,), peer = await run_against(script, options=options)
    assert record.outcome is Outcome.OK, record.error
    assert (len(record.arrived), record.counted_by, record.num_output_tokens, record.num_prompt_tokens) == (3, "messages", 3, 11)
    assert peer.asked[0].path == "/v1/chat/completions" and peer.asked[0].body["messages"] == [{"role": "user", "content": "0 7 8"}]


async def test_chat_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(TargetError, match="a tokenizer is needed"):
        OpenAITarget("http://127.0.0.1:1", OpenAIOptions(endpoint=Endpoint.CHAT))


async def test_several_tokens_in_a_message_are_counted_by_continuous_usage() -> None:
    script = sends(text_event("", tokens=1), text_event("abc", tokens=3, finish="length"), event({"choices": [], "usage": usage_of(3)}), DONE)
    (record,), _ = await run_against(script)
    assert [each.num_tokens for each in record.arrived] == [1, 2] and (record.outcome, record.counted_by) == (Outcome.OK, "usage")


async def test_usage_of_the_whole_on_the_last_choice_is_no_count_of_a_message() -> None:
    """As llama.cpp sends it."""
    script = sends(text_event("a"), text_event("b"), text_event("", tokens=3, finish="length"), DONE)
    (record,), _ = await run_against(script)
    assert [each.num_tokens for each in record.arrived] == [1, 1]
    assert (record.outcome, record.counted_by, record.num_output_tokens) == (Outcome.OK, "messages", 3)


async def test_a_server_without_usage_is_counted_by_messages() -> None:
    (record,), _ = await run_against(sends(text_event("a"), text_event("b"), text_event("c", finish="length"), DONE))
    assert (record.outcome, record.counted_by, record.num_output_tokens) == (Outcome.OK, "messages", 3)


async def test_each_message_has_the_time_at_which_it_came() -> None:
    first, *rest = whole_stream(3)
    (record,), _ = await run_against(sends(0.1, first, 0.1, *rest))
    at = [each.at_s - record.sent_s for each in record.arrived]
    assert at[0] >= 0.1 and at[1] - at[0] >= 0.09 and record.ended_s >= record.arrived[-1].at_s


async def test_a_stream_cut_within_an_event_arrives_as_it_would_whole() -> None:
    raw = b"".join(whole_stream(3))
    (record,), _ = await run_against(sends(*(raw[at : at + 5] for at in range(0, len(raw), 5))))
    assert record.outcome is Outcome.OK and record.num_output_tokens == 3


async def test_connections_are_kept_and_not_limited() -> None:
    records, peer = await run_against(answer_http, closed_plan(12, concurrency=2))
    assert all(record.outcome is Outcome.OK for record in records)
    assert peer.num_connections <= 2 + 2  # those of the model list and of the samples with them

    all_there = asyncio.Barrier(150)

    async def together(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await all_there.wait()
        await answer_http(asked, writer)

    records, _ = await run_against(together, plan_of_times(*[0.0] * 150))
    assert all(record.outcome is Outcome.OK for record in records)


def whole(status: int, body: bytes, content_type: str = "application/json") -> HttpScript:
    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await send_whole(writer, status, body, content_type=content_type)

    return script


async def _breaks_off(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    piece = text_event("a", tokens=1)
    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    await writer.drain()
    writer.close()


async def _never_ends(asked: Asked, writer: asyncio.StreamWriter) -> None:
    await send_stream(writer, [text_event("a", tokens=1), 60.0])


_ERROR = b'{"error": {"message": "the queue\\n is full", "type": "Service Unavailable", "code": 503}}'


@pytest.mark.parametrize(
    ("script", "outcome", "error"),
    [
        (whole(503, _ERROR), Outcome.REFUSED, "HTTP 503: 503 Service Unavailable the queue is full"),
        (whole(429, b"slow down", "text/plain"), Outcome.REFUSED, "HTTP 429: slow down"),
        (whole(400, b'{"error": {"message": "unknown field"}}'), Outcome.FAILED, "HTTP 400: unknown field"),
        (whole(500, b""), Outcome.FAILED, "HTTP 500: X"),
        (whole(200, b'{"choices": []}'), Outcome.FAILED, "it answered whole"),
        (_breaks_off, Outcome.FAILED, "ClientPayloadError"),
        (_never_ends, Outcome.TIMEOUT, "it had not ended after 0.4 s"),
        (sends(text_event("a", tokens=1)), Outcome.FAILED, "SseError: the stream ended without [DONE]"),
        (sends(b"data: {"), Outcome.FAILED, "SseError: the stream ended without [DONE], in the middle of an event"),
        (sends(b"data: {]\n\n", DONE), Outcome.FAILED, "SseError: no chunk of a completion (JSONDecodeError"),
        (sends(event({"error": {"message": "busy", "code": 503}}), DONE), Outcome.REFUSED, "error in the stream: 503 busy"),
        (sends(text_event("a", tokens=1), event({"error": {"message": "busy", "code": 503}}), DONE), Outcome.FAILED, "error in the stream: 503 busy"),
        (sends(*whole_stream(2)), Outcome.WRONG, "usage says 2 tokens instead of 3"),
        (sends(*whole_stream(3, finish="stop")), Outcome.WRONG, "finish reason stop instead of length"),
        (sends(text_event("", tokens=3, finish="length"), DONE), Outcome.WRONG, "no text"),
    ],
)
async def test_every_end_has_its_outcome_and_none_is_tried_again(script: HttpScript, outcome: Outcome, error: str) -> None:
    async def first_only(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await (script if asked.body["prompt"][0] == 0 else answer_http)(asked, writer)

    records, peer = await run_against(first_only, plan_of_times(0.0, 0.01), limits=RunLimits(request_s=0.4))
    assert (records[0].outcome, records[0].error.startswith(error)) == (outcome, True), records[0].error
    assert records[1].outcome is Outcome.OK  # and harms no other
    assert len(peer.asked) == 2


async def test_leaving_a_request_closes_its_connection() -> None:
    left = asyncio.Event()

    async def watch(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while not writer.is_closing():
                writer.write(b"2\r\n:\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.005)
        finally:
            left.set()

    async with scripted_http(watch) as peer, opened(peer.url) as target:
        measured = await Runner(plan_of_times(0.0), target, RunLimits(request_s=0.2), cold_start=False).run()
        assert measured.records[0].outcome is Outcome.TIMEOUT
        await asyncio.wait_for(left.wait(), WAIT_S)


async def test_state_and_description_come_from_the_server() -> None:
    async with scripted_http() as peer, opened(peer.url) as target:
        sample = await target.sample(lambda: 4.0)
        assert sample is not None and (sample.at_s, sample.num_running, sample.num_waiting, sample.kv_usage) == (4.0, 5, 7, 0.5)
        assert await target.describe() == {"model": "m", "max_model_len": "4096", "server": "scripted", "version": "0.32.0"}


async def test_a_server_without_metrics_is_not_asked_again() -> None:
    async with scripted_http() as peer, opened(peer.url) as target:
        page = peer.pages.pop("/metrics")
        assert await target.sample(lambda: 0.0) is None
        peer.pages["/metrics"] = page
        assert await target.sample(lambda: 0.0) is None


def test_metrics_of_tandem_and_sglang_are_read_too() -> None:
    ours = sample_of(b"tandem_num_requests_running 4.0\ntandem_num_requests_waiting 1.0\n", 1.0)
    assert ours is not None and (ours.num_running, ours.num_waiting, ours.kv_usage) == (4, 1, None)
    theirs = sample_of(b'sglang:num_running_reqs{model="m"} 2\nsglang:num_queue_reqs{model="m"} 3\nsglang:token_usage{model="m"} 0.1\n', 1.0)
    assert theirs is not None and (theirs.num_running, theirs.num_waiting, theirs.kv_usage) == (2, 3, 0.1)
    assert sample_of(b"process_cpu_seconds_total 3\n", 1.0) is None


@pytest.mark.parametrize(
    ("page", "model", "error"),
    [
        (b'{"data": [{"id": "a"}, {"id": "b"}]}', "", "lists a, b: name one with --model"),
        (b'{"data": []}', "", "lists no models"),
        (b'{"data": [{"id": "a"}]}', "b", "does not serve model 'b', but a"),
        (b"no json", "", "lists no models"),
    ],
)
async def test_a_model_that_is_not_clear_is_asked_for(page: bytes, model: str, error: str) -> None:
    async with scripted_http() as peer:
        peer.pages["/v1/models"] = page
        target = OpenAITarget(peer.url, OpenAIOptions(model=model))
        try:
            with pytest.raises(TargetError, match=error):
                await target.open()
        finally:
            await target.close()


async def test_nobody_there_is_told_at_once() -> None:
    target = OpenAITarget("http://127.0.0.1:1")
    try:
        with pytest.raises(TargetError, match=r"openai http://127.0.0.1:1 cannot be reached"):
            await asyncio.wait_for(target.open(), WAIT_S)
    finally:
        await target.close()
