from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-not-found]

from rpc.logs import HarmlessCancelFilter, configure_logging, request_id
from telemetry import tracing
from telemetry.receiver import OtlpReceiver
from tests.rpc.peers import method

LOG = logging.getLogger("test.logs")


@pytest.fixture(autouse=True)
def _root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


async def test_json_line_carries_the_ids_of_its_request(receiver: OtlpReceiver, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode", log_format="json", log_level="info")
    request_id.set("r1")
    with tracing.span("request"):
        ids = tracing.current_ids()
        LOG.info("hello %s", "world")
    (line,) = (json.loads(text) for text in _lines(capsys))

    assert ids is not None
    assert (line["message"], line["level"], line["service"], line["logger"]) == ("hello world", "info", "decode", "test.logs")
    assert (line["request_id"], line["trace_id"], line["span_id"]) == ("r1", *ids)


async def test_each_task_has_a_request_id_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode", log_format="json", log_level="info")

    async def work(name: str) -> None:
        request_id.set(name)
        await asyncio.sleep(0)
        LOG.info(name)

    await asyncio.gather(work("a"), work("b"))
    LOG.info("")

    assert [(line["message"], line.get("request_id")) for line in map(json.loads, _lines(capsys))] == [("a", "a"), ("b", "b"), ("", None)]


def test_json_line_holds_the_traceback_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode", log_format="json", log_level="info")
    try:
        raise ValueError("x\ny")
    except ValueError:
        LOG.exception("failed")
    (line,) = (json.loads(text) for text in _lines(capsys))

    assert "ValueError: x\ny" in line["traceback"]


def test_text_line_shows_the_request_id_and_the_level_filters(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode", log_format="text", log_level="warning")
    token = request_id.set("r2")
    LOG.info("quiet")
    LOG.warning("loud")
    request_id.reset(token)
    (line,) = _lines(capsys)

    assert line.endswith("WARNING test.logs: loud [request_id=r2]")


async def test_traceback_after_a_clients_cancel_is_hidden_and_the_real_error_is_not() -> None:
    """A server without our interceptor, on which grpc logs both: the handler's error, and that it could not send it to a client that had left."""
    unfiltered, filtered = _Collected(), _Collected()
    filtered.addFilter(HarmlessCancelFilter())
    logger = logging.getLogger("grpc._cython.cygrpc")
    logger.addHandler(unfiltered)
    logger.addHandler(filtered)

    async def fail_when_cancelled(_request: bytes, _context: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("a real error") from None

    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("a.B", {"C": grpc.unary_stream_rpc_method_handler(fail_when_cancelled)})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(20):
            while not any(isinstance(error, ExecuteBatchError) for error in unfiltered.errors):
                call = method(channel, "unary_stream", "/a.B/C")(b"")
                await asyncio.sleep(0.005)
                call.cancel()
                await asyncio.sleep(0.005)
    finally:
        await server.stop(0)
        logger.removeHandler(unfiltered)
        logger.removeHandler(filtered)

    assert filtered.errors and all(isinstance(error, ValueError) for error in filtered.errors)


@pytest.mark.parametrize(
    ("error", "logger"),
    [
        (ExecuteBatchError('Failed "execute_batch": (<SendMessageOperation>,)'), "grpc._cython.cygrpc"),
        (ValueError("SendInitialMetadataOperation"), "grpc._cython.cygrpc"),
        (ExecuteBatchError('Failed "execute_batch": (<SendInitialMetadataOperation>,)'), "decode_svc"),
        (None, "grpc._cython.cygrpc"),
    ],
)
def test_nothing_else_is_hidden(error: Exception | None, logger: str) -> None:
    exc_info = (type(error), error, None) if error else None
    record = logging.LogRecord(logger, logging.ERROR, __file__, 1, "SendInitialMetadataOperation", None, exc_info)

    assert HarmlessCancelFilter().filter(record)


class _Collected(logging.StreamHandler[io.StringIO]):
    """Keeps the exceptions of the records it is given."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.errors: list[BaseException | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(record.exc_info[1] if record.exc_info else None)
