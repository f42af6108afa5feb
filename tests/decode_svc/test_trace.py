"""One trace shows the whole of a hand-over, and its segments have timestamps of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvtransfer.errors import StalledError
from telemetry import spans, tracing
from telemetry.receiver import OtlpReceiver, ReceivedSpan
from tests.support.cluster import open_cluster, until

PROMPT = list(range(100, 130))
HANDOVER = {spans.RESERVE, spans.PREFILL_QUEUE, spans.PREFILL, spans.KV_HOLD, spans.KV_TRANSFER, spans.DECODE}


@asynccontextmanager
async def _receiving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[ReceivedSpan]]:
    """What was traced in the block, behind it."""
    async with OtlpReceiver() as receiver:
        found: list[ReceivedSpan] = []
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        tracing.configure_tracing("test", "test")
        try:
            yield found
            await tracing.flush()
        finally:
            await tracing.shutdown()
        found.extend(receiver.spans)


async def _traced(monkeypatch: pytest.MonkeyPatch, prefill: str) -> dict[str, ReceivedSpan]:
    async with _receiving(monkeypatch) as received, open_cluster() as cluster:
        await cluster.generate(cluster.request(PROMPT, prefill=prefill))
        await cluster.assert_nothing_held()
    assert len({span.trace_id for span in received}) == 1
    return {f"{span.kind} {span.name}" if span.kind != "INTERNAL" else span.name: span for span in received}


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
    assert float(str(transfer[spans.KV_PATH_BYTES_PER_S])) > 0
    hidden_s, wire_s, overlap = (float(str(transfer[name])) for name in (spans.KV_HIDDEN_S, spans.KV_WIRE_S, spans.KV_OVERLAP))
    assert 0 <= hidden_s <= wire_s
    assert overlap == pytest.approx(hidden_s / wire_s)
    assert not found[spans.KV_TRANSFER].events
    assert found[spans.DECODE].attributes[spans.NUM_TOKENS] == 8
    assert not any(span.status == "ERROR" for span in found.values())
    assert found[spans.PREFILL_QUEUE].end_ns == found[spans.PREFILL].start_ns


async def test_a_local_prompt_has_the_same_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await _traced(monkeypatch, "")
    assert set(found) == {"SERVER tandem.v1.DecodeService/Generate", spans.PREFILL_QUEUE, spans.PREFILL, spans.DECODE}


async def test_the_first_hand_over_by_another_path_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _receiving(monkeypatch) as received, open_cluster(transports=["memory", "inline"]) as cluster:
        pairing = cluster.decode.pool.peers.candidates("p0", 1)[0].pairing
        paired = await pairing.paired()
        for _ in range(3):
            paired.transfer_failed(StalledError("nothing comes"))
        await until(lambda: pairing.report().transport == "inline")
        for number in range(2):
            await cluster.generate(cluster.request(PROMPT[number:]))
    first, second = sorted((span for span in received if span.name == spans.KV_TRANSFER), key=lambda span: span.start_ns)
    (event,) = first.events
    assert event.name == spans.KV_PATH_CHANGED
    told = {name: first_event for name, first_event in event.attributes.items() if name != spans.KV_PATH_REASON}
    assert told == {spans.KV_PATH_FROM: "memory", spans.KV_PATH_TO: "inline"}
    assert "nothing comes" in str(event.attributes[spans.KV_PATH_REASON])
    assert not second.events


async def test_a_request_that_waited_for_a_pairing_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _receiving(monkeypatch) as received, open_cluster() as cluster:
        await cluster.prefills[0].kill()
        await until(lambda: not cluster.decode.load.report().kv_paths[0].transport)
        await cluster.generate(cluster.request(PROMPT))
    (waited,) = [span for span in received if span.name == spans.PAIRING]
    assert (waited.status, waited.attributes[spans.PREFILL_INSTANCE]) == ("ERROR", "p0")
