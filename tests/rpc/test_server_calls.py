from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from rpc import errors
from rpc.server import RpcServer
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, prefill_pb2_grpc
from telemetry.metrics import RpcMetrics
from telemetry.receiver import OtlpReceiver, ReceivedSpan
from tests.rpc.peers import SERVICE, Pair, method, serving

METHOD = f"{SERVICE}/UnaryUnary"


async def _abort(_request: bytes, context: Any) -> bytes:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
    return b""


async def _abort_with_status(_request: bytes, context: Any) -> bytes:
    await context.abort_with_status(errors.exhausted("QUEUE_FULL", "full", 1.0).to_status())
    return b""


async def _status_error(_request: bytes, _context: Any) -> bytes:
    raise errors.invalid_argument("n", "too large")


async def _set_code(_request: bytes, context: Any) -> bytes:
    context.set_code(grpc.StatusCode.DATA_LOSS)
    return b""


async def _uncaught(_request: bytes, _context: Any) -> bytes:
    raise ValueError("secret inside")


async def _own_cancel(_request: bytes, _context: Any) -> bytes:
    raise asyncio.CancelledError


async def _unimplemented(_request: bytes, context: Any) -> bytes:
    # What the generated base class does.
    context.set_code(grpc.StatusCode.UNIMPLEMENTED)
    raise NotImplementedError("Method not implemented!")


async def _answer(request: bytes, _context: Any) -> bytes:
    return request


async def _one_span(receiver: OtlpReceiver) -> ReceivedSpan:
    spans = await receiver.wait_for(lambda spans: any(span.kind == "SERVER" for span in spans), 5)
    return next(span for span in spans if span.kind == "SERVER")


@pytest.mark.parametrize(
    ("behaviour", "code", "span_status"),
    [
        (_answer, "OK", "UNSET"),
        (_abort, "UNAVAILABLE", "ERROR"),
        (_abort_with_status, "RESOURCE_EXHAUSTED", "UNSET"),
        (_status_error, "INVALID_ARGUMENT", "UNSET"),
        (_set_code, "DATA_LOSS", "ERROR"),
        (_uncaught, "INTERNAL", "ERROR"),
        (_own_cancel, "INTERNAL", "ERROR"),
        (_unimplemented, "UNIMPLEMENTED", "ERROR"),
    ],
)
async def test_client_span_and_counter_agree_on_the_status(receiver: OtlpReceiver, behaviour: Any, code: str, span_status: str) -> None:
    registry = CollectorRegistry()
    async with serving(metrics=RpcMetrics(registry), UnaryUnary=behaviour) as pair:
        call = pair.call("UnaryUnary", b"x", timeout=5)
        received = await call.code()
    span = await _one_span(receiver)

    assert received.name == code
    assert (span.name, span.status) == (METHOD, span_status)
    assert (span.attributes["rpc.system.name"], span.attributes["rpc.method"]) == ("grpc", METHOD)
    assert span.attributes["rpc.response.status_code"] == code
    assert span.attributes.get("error.type") == (code if span_status == "ERROR" else None)
    assert registry.get_sample_value("tandem_rpc_server_calls_total", {"rpc_method": METHOD, "grpc_code": code}) == 1
    assert registry.get_sample_value("tandem_rpc_server_active", {"rpc_method": METHOD}) == 0


async def test_uncaught_exception_tells_the_client_nothing_and_the_log_everything(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(UnaryUnary=_uncaught) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.call("UnaryUnary", b"", timeout=5)

    assert "secret" not in str(caught.value) and "ValueError" not in str(caught.value)
    (record,) = (record for record in caplog.records if record.name == "rpc.interceptor")
    assert record.levelno == logging.ERROR and record.exc_info is not None and "secret inside" in str(record.exc_info[1])


class _Waiting:
    """A streaming handler that sends one message and waits; tells when it began and how it ended."""

    def __init__(self, *, first_message: bool = True) -> None:
        self.began = asyncio.Event()
        self.ended = asyncio.Event()
        self._first_message = first_message

    async def __call__(self, _request: Any, context: Any) -> None:
        try:
            if self._first_message:
                await context.write(b"first")
            self.began.set()
            await asyncio.Event().wait()
        finally:
            self.ended.set()


def _method(waiting: _Waiting) -> Any:
    async def behaviour(request: Any, context: Any) -> None:
        await waiting(request, context)

    return behaviour


async def test_client_cancel_ends_the_handler_and_is_no_error(receiver: OtlpReceiver) -> None:
    waiting = _Waiting()
    async with serving(UnaryStream=_method(waiting)) as pair:
        call = pair.call("UnaryStream", b"")
        await call.read()
        assert pair.server.num_active_rpcs == 1
        call.cancel()
        await asyncio.wait_for(waiting.ended.wait(), 5)
        span = await _one_span(receiver)
        assert pair.server.num_active_rpcs == 0

    assert (span.attributes["rpc.response.status_code"], span.status) == ("CANCELLED", "UNSET")


async def test_deadline_is_told_from_a_cancel(receiver: OtlpReceiver) -> None:
    waiting = _Waiting()
    async with serving(UnaryStream=_method(waiting)) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in pair.call("UnaryStream", b"", timeout=0.2):
                pass
        await asyncio.wait_for(waiting.ended.wait(), 5)
        span = await _one_span(receiver)

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (span.attributes["rpc.response.status_code"], span.status) == ("DEADLINE_EXCEEDED", "ERROR")


async def test_all_four_kinds_pass_through() -> None:
    async def unary_stream(request: bytes, context: Any) -> None:
        for _ in range(3):
            await context.write(request)

    async def stream_unary(requests: AsyncIterator[bytes], _context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def stream_stream(_requests: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    async with serving(UnaryUnary=_answer, UnaryStream=unary_stream, StreamUnary=stream_unary, StreamStream=stream_stream) as pair:
        assert await pair.call("UnaryUnary", b"a", timeout=5) == b"a"
        assert [message async for message in pair.call("UnaryStream", b"a", timeout=5)] == [b"a"] * 3
        assert await pair.call("StreamUnary", iter([b"a", b"b"]), timeout=5) == b"ab"
        assert [message async for message in pair.call("StreamStream", iter([b"a", b"b"]), timeout=5)] == [b"a", b"b"]


async def test_generator_handler_is_closed_in_its_own_task_when_the_client_cancels() -> None:
    tasks: list[asyncio.Task[Any] | None] = []
    closed = asyncio.Event()

    async def generate(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        tasks.append(asyncio.current_task())
        try:
            while True:
                yield bytes(64 << 10)
        finally:
            tasks.append(asyncio.current_task())
            closed.set()

    async with serving(UnaryStream=generate) as pair:
        call = pair.call("UnaryStream", b"")
        await call.read()
        call.cancel()
        await asyncio.wait_for(closed.wait(), 5)

    assert tasks[0] is tasks[1]


async def test_bytes_that_are_no_message_are_the_clients_fault(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    server = RpcServer("test", metrics=RpcMetrics(registry))
    server.add(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, gateway_pb2_grpc.GatewayServiceServicer(), "tandem.v1.GatewayService")
    server.add(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, _Reads(), "tandem.v1.PrefillService")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
        not_utf8 = gateway_pb2.GenerateRequest(text="hello").SerializeToString().replace(b"hello", b"he\xff\xfeo")
        sent = {
            "GatewayService/Generate": ("unary_stream", not_utf8),
            "GatewayService/GenerateUnary": ("unary_unary", b"\x80\x04\x95"),
            "PrefillService/Prefill": ("stream_stream", iter([b"\x80\x04\x95"])),
        }
        for path, (kind, request) in sent.items():
            call = method(channel, kind, f"/tandem.v1.{path}")(request, timeout=5)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, path
    await server.drain(5)

    for path in sent:
        labels = {"rpc_method": f"tandem.v1.{path}", "grpc_code": "INVALID_ARGUMENT"}
        assert registry.get_sample_value("tandem_rpc_server_calls_total", labels) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR and record.name.startswith("rpc")]


class _Reads(prefill_pb2_grpc.PrefillServiceServicer):
    async def Prefill(self, request_iterator: Any, context: Any) -> None:
        await context.read()


async def test_a_connection_has_a_bounded_number_of_streams() -> None:
    async with serving(UnaryUnary=_answer) as pair:
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.server.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        header = await asyncio.wait_for(reader.readexactly(9), 5)
        settings = await asyncio.wait_for(reader.readexactly(int.from_bytes(header[:3], "big")), 5)
        writer.close()
    pairs = [struct.unpack(">HI", settings[at : at + 6]) for at in range(0, len(settings), 6)]

    assert header[3] == 4, "a SETTINGS frame comes first"
    assert dict(pairs)[3] == 4096, "SETTINGS_MAX_CONCURRENT_STREAMS"


async def test_unknown_method_is_unimplemented_and_makes_no_label() -> None:
    registry = CollectorRegistry()
    async with serving(metrics=RpcMetrics(registry), UnaryUnary=_answer) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(pair.channel, "unary_unary", "/client.invented/Name")(b"", timeout=5)

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert [sample for family in registry.collect() for sample in family.samples] == []


async def test_support_methods_open_no_span(receiver: OtlpReceiver) -> None:
    async def read_kv(_request: bytes, context: Any) -> None:
        await context.write(b"chunk")

    async with serving(ReadKv=read_kv, UnaryUnary=_answer) as pair:
        assert [chunk async for chunk in pair.call("ReadKv", b"", timeout=5)] == [b"chunk"]
        await pair.call("UnaryUnary", b"", timeout=5)
        await _one_span(receiver)

    assert [span.name for span in receiver.spans] == [METHOD]


async def test_cancels_in_the_middle_of_a_message_log_no_error(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()

    async def flood(_request: bytes, context: Any) -> None:
        while True:
            await context.write(bytes(60_000))

    async with serving(UnaryStream=flood, metrics=RpcMetrics(registry)) as pair:
        for _ in range(5):
            calls = [pair.call("UnaryStream", b"") for _ in range(40)]
            for call in calls:
                await call.read()
                call.cancel()
        async with asyncio.timeout(10):
            while pair.server.num_active_rpcs:  # noqa: ASYNC110  # ends with the last status
                await asyncio.sleep(0.01)
        labels = {"rpc_method": f"{SERVICE}/UnaryStream", "grpc_code": "CANCELLED"}
        assert registry.get_sample_value("tandem_rpc_server_calls_total", labels) == 200

    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_cancels_before_the_first_response_hold_nothing_and_log_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def write_late(_request: bytes, context: Any) -> None:
        await asyncio.sleep(0)
        await context.write(b"late")
        await asyncio.Event().wait()

    async def cancel_at_once(pair: Pair) -> None:
        call = pair.call("UnaryStream", b"")
        await asyncio.sleep(0.002)
        call.cancel()

    async with serving(UnaryStream=write_late) as pair:
        await asyncio.gather(*(cancel_at_once(pair) for _ in range(100)))
        assert await pair.server.drain(5)

    assert [record for record in caplog.records if record.name == "rpc.interceptor" and record.levelno >= logging.ERROR] == []
