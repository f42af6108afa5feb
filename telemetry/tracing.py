"""Spans over OTLP, or nothing at all.

Tracing is off unless OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set (and OTEL_SDK_DISABLED is not true and
OTEL_TRACES_EXPORTER is not none). Off, and below an unsampled parent, no SDK span object is made; off, the SDK is not even imported. Sampler, batching,
headers, limits and resource attributes are the SDK's own OTEL_* variables.

All spans get their times from `time.monotonic_ns()`, converted with one offset to the wall clock, so that spans of the event loop and spans recorded
from the engine thread's timestamps lie on one axis.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from telemetry.clock import WallClock
from telemetry.spans import CANCELLED, ERROR_TYPE

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int]
Attributes = Mapping[str, AttributeValue]
Metadata = Iterable[tuple[str, str | bytes]]
SpanEvent = tuple[str, int, Attributes]

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_EXPORT_TIMEOUT_S: Final = 3.0
_MAX_TRACESTATE_CHARS: Final = 512
"""What W3C asks to pass on; a client's longer one would fill the metadata of every hop."""


class SpanHandle:
    """A span being recorded, or nothing when it is off or not sampled; every method is then a no-op."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span | None) -> None:
        self._span = span

    @property
    def recording(self) -> bool:
        """False when whatever is set would be thrown away."""
        return self._span is not None and self._span.is_recording()

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Sets one attribute; names stand in telemetry.spans."""
        if self._span is not None:
            self._span.set_attribute(key, value)

    def add_event(self, name: str, attributes: Attributes | None = None, *, at_ns: int | None = None) -> None:
        """Adds an event, now or at a `time.monotonic_ns()` timestamp."""
        if self._span is not None:
            monotonic_ns = time.monotonic_ns() if at_ns is None else at_ns
            self._span.add_event(name, attributes, monotonic_ns + _clock.offset_ns())

    def fail(self, error_type: str, description: str = "") -> None:
        """Marks the span ERROR with `error.type`."""
        if self._span is not None:
            self._span.set_attribute(ERROR_TYPE, error_type)
            self._span.set_status(StatusCode.ERROR, description or None)


NO_SPAN: Final = SpanHandle(None)
_clock: Final = WallClock()
_provider: TracerProvider | None = None
_tracer: trace.Tracer | None = None


def _wanted() -> bool:
    environ = os.environ
    disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    return not disabled and bool(environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"))


def configure_tracing(service_name: str, instance: str) -> None:
    """Starts tracing when the environment asks for it; `service_name` gives way to OTEL_SERVICE_NAME.

    Raises ValueError for a protocol other than grpc and for OTEL_* settings that the SDK refuses, and RuntimeError when tracing is on already.
    """
    global _provider, _tracer
    if not _wanted():
        return
    if _provider is not None:
        raise RuntimeError("tracing is configured already")
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol != "grpc":
        raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL: only grpc is supported, not {protocol!r}")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes: dict[str, str] = {"service.namespace": "tandem", "service.instance.id": instance}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        attributes["service.name"] = service_name
    try:
        # No exit hook: an unreachable collector would hold the process's exit; shutdown() below is bounded.
        provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except Exception as error:  # the SDK has classes of its own for this, and not for all of it
        raise ValueError(f"tracing cannot be set up by the OTEL_* environment: {error}") from error
    _provider, _tracer = provider, provider.get_tracer("tandem")


def tracing_enabled() -> bool:
    """Whether spans are made at all."""
    return _tracer is not None


def current_context() -> Context | None:
    """The context to give to spans that are recorded later or elsewhere; None when tracing is off or nothing is being traced."""
    if _tracer is None or not trace.get_current_span().get_span_context().is_valid:
        return None
    return otel_context.get_current()


def current_ids() -> tuple[str, str] | None:
    """The trace id and span id in hexadecimal, for log lines; None outside of a trace."""
    if _tracer is None:
        return None
    ids = trace.get_current_span().get_span_context()
    return (trace.format_trace_id(ids.trace_id), trace.format_span_id(ids.span_id)) if ids.is_valid else None


def inject(metadata: MutableSequence[tuple[str, str | bytes]]) -> None:
    """Appends traceparent (and tracestate) of the current span to gRPC metadata; nothing when tracing is off."""
    if _tracer is None:
        return
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    metadata.extend(carrier.items())


def extract(metadata: Metadata) -> Context | None:
    """The caller's context from gRPC metadata; None when tracing is off or there is no valid traceparent."""
    if _tracer is None:
        return None
    carrier = {key: value for key, value in metadata if key in ("traceparent", "tracestate") and isinstance(value, str)}
    if len(carrier.get("tracestate", "")) > _MAX_TRACESTATE_CHARS:
        del carrier["tracestate"]
    if "traceparent" not in carrier:
        return None
    context = _PROPAGATOR.extract(carrier, context=Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


@contextmanager
def span(
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes | None = None,
    parent: Context | None = None,
    set_error: bool = True,
) -> Iterator[SpanHandle]:
    """A span around a block of code, current inside it. `parent` defaults to the current context.

    An exception that leaves the block marks the span ERROR with the exception's class as `error.type`, a cancel sets an attribute;
    with `set_error` False the block does all that itself.
    """
    if _tracer is None:
        yield NO_SPAN
        return
    offset_ns, started_ns = _clock.offset_ns(), time.monotonic_ns()
    otel_span = _tracer.start_span(name, context=parent, kind=kind, attributes=attributes, start_time=started_ns + offset_ns)
    handle = SpanHandle(otel_span)
    token = otel_context.attach(trace.set_span_in_context(otel_span, parent))
    try:
        yield handle
    except (asyncio.CancelledError, GeneratorExit):
        if set_error:
            handle.set_attribute(CANCELLED, True)
        raise
    except Exception as error:
        if set_error:
            handle.fail(type(error).__qualname__, str(error))
        raise
    finally:
        otel_context.detach(token)
        otel_span.end(end_time=time.monotonic_ns() + offset_ns)


def record_span(
    name: str,
    started_ns: int,
    ended_ns: int,
    *,
    parent: Context | None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes | None = None,
    events: Iterable[SpanEvent] = (),
    error: str | None = None,
) -> None:
    """Records a span that is over, from `time.monotonic_ns()` timestamps taken on any thread.

    `parent` is what `current_context()` gave to the request; None (off, or not traced) records nothing. `error` is the `error.type`. On an event loop it is
    made in the loop's next turn: what is over need not delay what comes next.
    """
    if _tracer is None or parent is None:
        return
    tracer, offset_ns, happened = _tracer, _clock.offset_ns(), tuple(events)

    def make() -> None:
        otel_span = tracer.start_span(name, context=parent, kind=kind, attributes=attributes, start_time=started_ns + offset_ns)
        for event_name, at_ns, event_attributes in happened:
            otel_span.add_event(event_name, event_attributes, at_ns + offset_ns)
        if error is not None:
            SpanHandle(otel_span).fail(error)
        otel_span.end(end_time=ended_ns + offset_ns)

    try:
        asyncio.get_running_loop().call_soon(make)
    except RuntimeError:
        make()


async def flush(timeout_s: float = _EXPORT_TIMEOUT_S) -> bool:
    """Exports what is waiting. False when it was not done within `timeout_s`."""
    if _provider is None:
        return True
    await asyncio.sleep(0)  # what was recorded in this turn
    provider = _provider
    return await _in_thread(lambda: provider.force_flush(int(timeout_s * 1000)), timeout_s)


async def shutdown(timeout_s: float = _EXPORT_TIMEOUT_S) -> bool:
    """Exports what is waiting and turns tracing off. False when an unreachable collector used up `timeout_s`; the rest is then lost."""
    global _provider, _tracer
    if _provider is None:
        return True
    await asyncio.sleep(0)  # what was recorded in this turn
    provider, _provider, _tracer = _provider, None, None
    return await _in_thread(provider.shutdown, timeout_s)


async def _in_thread(export: Callable[[], bool | None], timeout_s: float) -> bool:
    # A daemon thread of its own: executor threads are joined at exit, without a bound.
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    results: list[bool | None] = []

    def run() -> None:
        try:
            results.append(export())
        finally:
            if not loop.is_closed():
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="tracing-export", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), timeout_s)
    except TimeoutError:
        return False
    return results != [] and results[0] is not False
