"""One trace shows the whole of a hand-over, and its segments have timestamps of their own."""

from __future__ import annotations

import pytest

from telemetry import spans, tracing
from telemetry.receiver import OtlpReceiver, ReceivedSpan
from tests.support.cluster import open_cluster

PROMPT = list(range(100, 130))
HANDOVER = {spans.RESERVE, spans.PREFILL_QUEUE, spans.PREFILL, spans.KV_HOLD, spans.KV_TRANSFER, spans.DECODE}


async def _traced(monkeypatch: pytest.MonkeyPatch, prefill: str) -> dict[str, ReceivedSpan]:
    async with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        tracing.configure_tracing("test", "test")
        try:
            async with open_cluster() as cluster:
                await cluster.generate(cluster.request(PROMPT, prefill=prefill))
                await cluster.assert_nothing_held()
            await tracing.flush()
        finally:
            await tracing.shutdown()
        assert len({span.trace_id for span in receiver.spans}) == 1
        return {f"{span.kind} {span.name}" if span.kind != "INTERNAL" else span.name: span for span in receiver.spans}


async def test_a_hand_over_is_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await _traced(monkeypatch, "p0")
    decode, client, prefill = (
        found["SERVER tandem.v1.DecodeService/Generate"],
        found["CLIENT tandem.v1.PrefillService/Prefill"],
        found["SERVER tandem.v1.PrefillService/Prefill"],
    )
    assert set(found) - HANDOVER == {
        "SERVER tandem.v1.DecodeService/Generate",
        "CLIENT tandem.v1.PrefillService/Prefill",
        "SERVER tandem.v1.PrefillService/Prefill",
    }
    assert prefill.parent_id == client.span_id
    assert client.parent_id == decode.span_id
    for name in (spans.PREFILL_QUEUE, spans.PREFILL, spans.KV_HOLD):
        assert found[name].parent_id == prefill.span_id
    for name in (spans.RESERVE, spans.KV_TRANSFER, spans.DECODE):
        assert found[name].parent_id == decode.span_id
    assert [event.name for event in found[spans.PREFILL].events] == [spans.CHUNK] * 4
    assert [event.name for event in found[spans.DECODE].events] == [spans.FIRST_TOKEN]
    transfer = found[spans.KV_TRANSFER].attributes
    assert (transfer[spans.KV_BYTES], transfer[spans.NUM_BLOCKS], transfer[spans.KV_TRANSPORT]) == (8 * 128, 8, "inline")
    assert found[spans.DECODE].attributes[spans.NUM_TOKENS] == 8
    assert not any(span.status == "ERROR" for span in found.values())
    assert found[spans.PREFILL_QUEUE].end_ns == found[spans.PREFILL].start_ns


async def test_a_local_prompt_has_the_same_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await _traced(monkeypatch, "")
    assert set(found) == {"SERVER tandem.v1.DecodeService/Generate", spans.PREFILL_QUEUE, spans.PREFILL, spans.DECODE}
