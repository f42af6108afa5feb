from __future__ import annotations

import asyncio

import pytest

from telemetry import tracing
from telemetry.receiver import OtlpReceiver


async def test_receiver_keeps_the_newest_spans_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with OtlpReceiver(max_spans=3) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        tracing.configure_tracing("test", "test-0")
        for number in range(5):
            with tracing.span(f"s{number}"):
                pass
        assert await tracing.shutdown()

        assert [span.name for span in receiver.spans] == ["s2", "s3", "s4"]
        assert receiver.num_received == 5


async def test_trace_is_ordered_by_start_and_attributes_keep_their_types(receiver: OtlpReceiver) -> None:
    with tracing.span("outer", attributes={"s": "x", "i": 3, "f": 0.5, "b": True, "l": ["a", "b"]}), tracing.span("inner"):
        ids = tracing.current_ids()
    assert ids is not None
    await receiver.wait_for(lambda spans: len(spans) == 2, 5)
    outer, inner = receiver.trace(ids[0])

    assert (outer.name, inner.name, inner.span_id) == ("outer", "inner", ids[1])
    assert outer.attributes == {"s": "x", "i": 3, "f": 0.5, "b": True, "l": ["a", "b"]}
    assert outer.duration_s >= inner.duration_s >= 0


async def test_waiting_for_spans_that_do_not_come_is_bounded() -> None:
    async with OtlpReceiver() as receiver:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiver.wait_for(lambda spans: bool(spans), 0.05), 5)
