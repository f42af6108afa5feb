from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import opentelemetry.sdk.trace as sdk_trace
import pytest

from telemetry import tracing
from telemetry.receiver import OtlpReceiver

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.fixture
def num_sdk_spans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list whose only element counts the SDK's span objects."""
    count = [0]
    original = sdk_trace.Span.__init__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        count[0] += 1
        original(self, *arguments, **options)

    monkeypatch.setattr(sdk_trace.Span, "__init__", counted)
    return count


def _use_every_way(parent_metadata: list[tuple[str, str | bytes]]) -> list[tuple[str, str | bytes]]:
    """One request's worth of spans; returns what an outgoing RPC would carry."""
    carried: list[tuple[str, str | bytes]] = []
    with tracing.span("server", parent=tracing.extract(parent_metadata)) as handle:
        handle.set_attribute("a", 1)
        handle.add_event("e")
        tracing.inject(carried)
        now_ns = time.monotonic_ns()
        tracing.record_span("engine", now_ns - 1000, now_ns, parent=tracing.current_context(), events=[("chunk", now_ns, {})])
    return carried


def test_off_makes_no_sdk_span_and_carries_nothing(num_sdk_spans: list[int]) -> None:
    assert not tracing.tracing_enabled()
    assert _use_every_way([("traceparent", SAMPLED)]) == []
    assert tracing.current_context() is None and tracing.current_ids() is None
    assert num_sdk_spans == [0]


def test_off_does_not_import_the_sdk() -> None:
    script = "import sys, telemetry.tracing as t; t.configure_tracing('a', 'b'); assert not [m for m in sys.modules if m.startswith('opentelemetry.sdk')]"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("variable", [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_environment_can_turn_it_off(monkeypatch: pytest.MonkeyPatch, variable: tuple[str, str]) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(*variable)
    tracing.configure_tracing("test", "test-0")

    assert not tracing.tracing_enabled()


def test_protocol_other_than_grpc_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")

    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        tracing.configure_tracing("test", "test-0")


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"])
def test_settings_that_the_sdk_refuses_are_one_error_and_leave_tracing_off(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, "nonsense")
    with pytest.raises(ValueError, match="OTEL_"):
        tracing.configure_tracing("test", "test-0")
    assert not tracing.tracing_enabled()


@pytest.mark.parametrize(("num_chars", "kept"), [(512, True), (513, False)])
def test_a_long_tracestate_is_not_passed_on(receiver: OtlpReceiver, num_chars: int, kept: bool) -> None:
    members = ",".join(f"k{index}={'v' * 200}" for index in range(3))[:num_chars].ljust(num_chars, "v")
    carried = dict(_use_every_way([("traceparent", SAMPLED), ("tracestate", members)]))
    assert str(carried["traceparent"]).startswith(SAMPLED[:35])
    assert ("tracestate" in carried) is kept


async def test_unsampled_parent_makes_no_sdk_span_and_is_passed_on(receiver: OtlpReceiver, num_sdk_spans: list[int]) -> None:
    carried = _use_every_way([("traceparent", UNSAMPLED)])

    assert num_sdk_spans == [0]
    assert [(key, str(value)[:35], str(value)[-2:]) for key, value in carried] == [("traceparent", UNSAMPLED[:35], "00")]


async def test_sampled_parent_is_the_parent_over_the_wire(receiver: OtlpReceiver, num_sdk_spans: list[int]) -> None:
    carried = _use_every_way([("traceparent", SAMPLED)])
    assert await tracing.flush()
    server, engine = sorted(receiver.spans, key=lambda span: span.name == "engine")

    assert num_sdk_spans == [2]
    assert (server.trace_id, server.parent_id) == (SAMPLED[3:35], SAMPLED[36:52])
    assert (engine.trace_id, engine.parent_id) == (server.trace_id, server.span_id)
    assert dict(carried)["traceparent"] == f"00-{server.trace_id}-{server.span_id}-01"
    assert (server.service, server.instance, server.kind) == ("test", "test-0", "INTERNAL")
    assert [event.name for event in engine.events] == ["chunk"]


async def test_malformed_traceparent_starts_a_trace_of_its_own(receiver: OtlpReceiver) -> None:
    assert tracing.extract([("traceparent", "00-nonsense")]) is None
    assert tracing.extract([("traceparent", b"\xff")]) is None
    assert tracing.extract([]) is None


async def test_engine_thread_times_lie_on_the_same_axis_as_the_loops(receiver: OtlpReceiver) -> None:
    times_ns: list[int] = []

    def engine() -> None:
        times_ns.append(time.monotonic_ns())
        times_ns.append(time.monotonic_ns())

    before_ns = time.time_ns()
    with tracing.span("request"):
        context = tracing.current_context()
        thread = threading.Thread(target=engine)
        thread.start()
        thread.join()
    after_ns = time.time_ns()
    tracing.record_span("step", *times_ns, parent=context, attributes={"n": 1}, error="Broken")
    await tracing.flush()
    spans = {span.name: span for span in receiver.spans}
    request, step = spans["request"], spans["step"]

    assert request.start_ns <= step.start_ns <= step.end_ns <= request.end_ns
    assert step.end_ns - step.start_ns == times_ns[1] - times_ns[0]
    assert before_ns - 1_000_000 <= request.start_ns and request.end_ns <= after_ns + 1_000_000
    assert (step.status, step.attributes) == ("ERROR", {"n": 1, "error.type": "Broken"})


async def test_exception_marks_the_span_and_a_cancel_does_not(receiver: OtlpReceiver) -> None:
    with pytest.raises(KeyError), tracing.span("failed"):
        raise KeyError("x")
    with pytest.raises(asyncio.CancelledError), tracing.span("cancelled"):
        raise asyncio.CancelledError
    await tracing.flush()
    spans = {span.name: span for span in receiver.spans}

    assert (spans["failed"].status, spans["failed"].attributes["error.type"]) == ("ERROR", "KeyError")
    assert (spans["cancelled"].status, spans["cancelled"].attributes) == ("UNSET", {"tandem.cancelled": True})


async def test_shutdown_is_bounded_when_the_collector_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracing.configure_tracing("test", "test-0")
    with tracing.span("lost"):
        pass
    started_s = time.monotonic()
    await tracing.shutdown(0.5)

    assert time.monotonic() - started_s < 2
    assert not tracing.tracing_enabled()


async def test_service_name_of_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    async with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        tracing.configure_tracing("test", "test-0")
        with tracing.span("named"):
            pass
        await tracing.shutdown()

        assert [span.service for span in receiver.spans] == ["mine"]
