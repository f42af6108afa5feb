"""An OTLP gRPC receiver inside the process: keeps spans and gives them as simple objects. For the demo, the checks and the tests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

AttributeValue = str | bool | int | float | bytes | list["AttributeValue"] | None


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """An event of a span; `at_ns` since the epoch."""

    name: str
    at_ns: int
    attributes: Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it came over the wire; ids in hexadecimal, `parent_id` empty for a root, times in nanoseconds since the epoch.

    `kind` is INTERNAL, SERVER, CLIENT, PRODUCER or CONSUMER; `status` is UNSET, OK or ERROR.
    """

    name: str
    service: str
    instance: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    events: tuple[ReceivedEvent, ...]
    status: str
    status_message: str

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return (self.end_ns - self.start_ns) / 1e9


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Serves OTLP on 127.0.0.1 and keeps the newest `max_spans` spans. Lives on one event loop.

    Usage: `async with OtlpReceiver() as receiver:` and give `receiver.endpoint` to others as OTEL_EXPORTER_OTLP_ENDPOINT.
    """

    def __init__(self, max_spans: int = 20_000) -> None:
        self._spans: deque[ReceivedSpan] = deque(maxlen=max_spans)
        self._arrival = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self.endpoint = ""
        self.num_received = 0

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._server is not None:
            await self._server.stop(0.5)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Takes a batch of spans."""
        async with self._arrival:
            for resource_spans in request.resource_spans:
                resource = _attributes(resource_spans.resource.attributes)
                for scope_spans in resource_spans.scope_spans:
                    for span in scope_spans.spans:
                        self._spans.append(_received(span, resource))
                        self.num_received += 1
            self._arrival.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> tuple[ReceivedSpan, ...]:
        """What is kept, oldest arrival first."""
        return tuple(self._spans)

    def trace(self, trace_id: str) -> tuple[ReceivedSpan, ...]:
        """One trace's spans by start time."""
        return tuple(sorted((span for span in self._spans if span.trace_id == trace_id), key=lambda span: span.start_ns))

    async def wait_for(self, predicate: Callable[[tuple[ReceivedSpan, ...]], bool], timeout_s: float = 10.0) -> tuple[ReceivedSpan, ...]:
        """Waits until `predicate(spans)` holds and returns the spans; raises TimeoutError."""
        async with asyncio.timeout(timeout_s), self._arrival:
            await self._arrival.wait_for(lambda: predicate(self.spans))
        return self.spans


def _received(span: trace_pb2.Span, resource: Mapping[str, AttributeValue]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        service=str(resource.get("service.name", "")),
        instance=str(resource.get("service.instance.id", "")),
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(ReceivedEvent(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events),
        status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        status_message=span.status.message,
    )


def _attributes(pairs: object) -> dict[str, AttributeValue]:
    return {pair.key: _value(pair.value) for pair in pairs}  # type: ignore[attr-defined]


def _value(value: common_pb2.AnyValue) -> AttributeValue:
    match value.WhichOneof("value"):
        case "array_value":
            return [_value(element) for element in value.array_value.values]
        case "kvlist_value":
            return [element.key for element in value.kvlist_value.values]
        case None:
            return None
        case name:
            return getattr(value, name)  # type: ignore[no-any-return]
