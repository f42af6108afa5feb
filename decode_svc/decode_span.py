"""The span `decode`."""

from __future__ import annotations

import time

from opentelemetry.context import Context

from telemetry import spans
from telemetry.tracing import SpanEvent, record_span


class DecodeSpan:
    """From known first tokens to the last one. Recorded once, by `end`, below the span `trace`."""

    def __init__(self, trace: Context | None) -> None:
        self._started_ns = time.monotonic_ns()
        self._num_tokens = 0
        self._trace = trace
        self._events: list[SpanEvent] = []

    def sent(self, num_tokens: int) -> None:
        """These have gone out; the first time it is a first token, if any was wanted."""
        if not self._num_tokens:
            self._events.append((spans.FIRST_TOKEN, time.monotonic_ns(), {}))
        self._num_tokens += num_tokens

    def preempted(self, at_ns: int) -> None:
        """A sample is to be computed again."""
        self._events.append((spans.PREEMPTED, at_ns, {}))

    def end(self, error: str | None = None) -> float:
        """The last token has gone out, or there will be none; returns the seconds since the start."""
        ended_ns = time.monotonic_ns()
        attributes = {spans.NUM_TOKENS: self._num_tokens}
        record_span(spans.DECODE, self._started_ns, ended_ns, parent=self._trace, attributes=attributes, events=self._events, error=error)
        return (ended_ns - self._started_ns) / 1e9
