"""How a prompt got on in an engine, from its events: the spans prefill.queue and prefill, and what a report says of it."""

from __future__ import annotations

import time

from engine.events import ChunkComputed, Event, Preempted, Scheduled
from telemetry import spans
from telemetry.tracing import SpanEvent, current_context, record_span

_ABANDONED = "cancelled"


class PromptProgress:
    """Made when a prompt arrives, under its SERVER span; times are `time.monotonic_ns()`."""

    def __init__(self) -> None:
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.arrived_ns = time.monotonic_ns()
        self.scheduled_ns = 0
        self.ended_ns = 0
        self._trace = current_context()
        self._events: list[SpanEvent] = []

    @property
    def queue_s(self) -> float:
        """Seconds until the first chunk."""
        return (self.scheduled_ns - self.arrived_ns) / 1e9

    @property
    def prefill_s(self) -> float:
        """Seconds from the first chunk to the end."""
        return (self.ended_ns - self.scheduled_ns) / 1e9

    def take(self, event: Event) -> None:
        """Looks at an event of the engine; a prompt's end is told by `end`."""
        match event:
            case Scheduled():
                self.scheduled_ns = event.at_ns
                self.cached_tokens = event.cached_tokens
                record_span(spans.PREFILL_QUEUE, self.arrived_ns, event.at_ns, parent=self._trace)
            case ChunkComputed():
                self.computed_tokens += event.num_tokens
                self._events.append((spans.CHUNK, event.ended_ns, {spans.NUM_TOKENS: event.num_tokens}))
            case Preempted():
                self._events.append((spans.PREEMPTED, event.at_ns, {}))
            case _:
                pass

    def end(self, error: str | None = None) -> None:
        """The prompt is computed and its first token is here."""
        self.ended_ns = time.monotonic_ns()
        attributes = {spans.NUM_TOKENS: self.computed_tokens}
        record_span(spans.PREFILL, self.scheduled_ns, self.ended_ns, parent=self._trace, attributes=attributes, events=self._events, error=error)

    def abandon(self) -> None:
        """For a `finally`: what has not ended by now was cancelled, or failed."""
        if self.ended_ns:
            return
        if self.scheduled_ns:
            self.end(_ABANDONED)
        else:
            self.ended_ns = time.monotonic_ns()
            record_span(spans.PREFILL_QUEUE, self.arrived_ns, self.ended_ns, parent=self._trace, error=_ABANDONED)
