from __future__ import annotations

import asyncio
from typing import Any

import grpc
import opentelemetry.sdk.trace as sdk_trace
import pytest

from rpc.client import outgoing
from rpc.errors import StatusError, unavailable
from telemetry import tracing
from telemetry.receiver import OtlpReceiver, ReceivedSpan
from tests.rpc.peers import SERVICE, serving

METHOD = f"{SERVICE}/StreamStream"


async def _trace_of(receiver: OtlpReceiver, *kinds: str) -> dict[str, ReceivedSpan]:
    await receiver.wait_for(lambda spans: {span.kind for span in spans} >= set(kinds), 5)
    return {span.kind: span for span in receiver.spans}


async def test_server_span_is_the_child_of_the_client_span(receiver: OtlpReceiver) -> None:
    async def echo(_requests: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    async with serving(StreamStream=echo) as pair:
        with outgoing(METHOD, metadata=(("tandem-request-id", "r1"),)) as (metadata, _span):
            assert metadata[0] == ("tandem-request-id", "r1")
            call = pair.call("StreamStream", iter([b"a"]), metadata=metadata, timeout=5)
            assert [message async for message in call] == [b"a"]
    spans = await _trace_of(receiver, "CLIENT", "SERVER")
    client, server = spans["CLIENT"], spans["SERVER"]

    assert (server.trace_id, server.parent_id) == (client.trace_id, client.span_id)
    assert (client.name, client.status, client.attributes["rpc.response.status_code"]) == (METHOD, "UNSET", "OK")


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "UNAVAILABLE"])
async def test_any_status_but_ok_is_an_error_of_the_client_span(receiver: OtlpReceiver, code: str) -> None:
    async def refuse(_request: bytes, _context: Any) -> bytes:
        raise StatusError(grpc.StatusCode[code], "no")

    async with serving(UnaryUnary=refuse) as pair:
        with pytest.raises(grpc.aio.AioRpcError), outgoing(f"/{SERVICE}/UnaryUnary") as (metadata, _span):
            await pair.call("UnaryUnary", b"", metadata=metadata, timeout=5)
    client = (await _trace_of(receiver, "CLIENT"))["CLIENT"]

    assert (client.name, client.status, client.attributes["error.type"]) == (f"{SERVICE}/UnaryUnary", "ERROR", code)


async def test_cancel_and_status_error_leave_their_code_on_the_client_span(receiver: OtlpReceiver) -> None:
    with pytest.raises(asyncio.CancelledError), outgoing("a.B/Cancelled"):
        raise asyncio.CancelledError
    with pytest.raises(StatusError), outgoing("a.B/Refused"):
        raise unavailable("NO_DECODE", "none")
    await receiver.wait_for(lambda spans: len(spans) == 2, 5)

    assert {span.name: span.attributes["rpc.response.status_code"] for span in receiver.spans} == {
        "a.B/Cancelled": "CANCELLED",
        "a.B/Refused": "UNAVAILABLE",
    }


async def test_metadata_passes_through_untouched_when_tracing_is_off() -> None:
    with outgoing(METHOD, metadata=(("a", "b"),)) as (metadata, span):
        assert metadata == (("a", "b"),) and not span.recording


@pytest.mark.parametrize("on", [False, True])
async def test_whole_call_makes_no_sdk_span_when_off_or_not_sampled(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    made: list[object] = []
    original = sdk_trace.Span.__init__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        made.append(self)
        original(self, *arguments, **options)

    async def answer(request: bytes, context: Any) -> bytes:
        seen.append("traceparent" in dict(context.invocation_metadata()))
        return request

    seen: list[bool] = []
    monkeypatch.setattr(sdk_trace.Span, "__init__", counted)
    if on:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        tracing.configure_tracing("test", "test-0")
    try:
        parent = tracing.extract([("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")])
        async with serving(UnaryUnary=answer) as pair:
            with tracing.span("gateway", parent=parent), outgoing(f"{SERVICE}/UnaryUnary") as (metadata, _span):
                await pair.call("UnaryUnary", b"", metadata=metadata, timeout=5)
    finally:
        await tracing.shutdown()

    assert made == []
    assert seen == [on]
