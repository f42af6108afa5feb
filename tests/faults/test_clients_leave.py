"""A client that leaves, by cancel or by its deadline, in whatever phase its request is in as the servers see it: nothing stays held."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from telemetry import spans
from telemetry.receiver import OtlpReceiver, ReceivedSpan
from tests.support.live_request import LiveRequest
from tests.support.live_stack import LiveStack, live_stack, options_of
from tests.support.reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")
_DELAY_S = 0.2
_ORDER = (spans.TOKENIZE, spans.QUEUE, spans.ROUTE, spans.RESERVE, spans.PREFILL_QUEUE, spans.PREFILL, spans.DECODE, spans.KV_TRANSFER, spans.KV_HOLD)
"""The first seven follow each other; the transfer begins with the first chunk and the hold with the first token."""
_GATEWAY = "tandem.v1.GatewayService/Generate"
_keys = itertools.count(3)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def receiver() -> AsyncIterator[OtlpReceiver]:
    async with OtlpReceiver() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def slow(served_model: Path, receiver: OtlpReceiver) -> AsyncIterator[LiveStack]:
    """Every segment takes a fifth of a second."""
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_SDK_DISABLED": "false",
        "TANDEM_FAILPOINTS": ",".join(f"{name}=delay:{_DELAY_S}" for name in _ORDER),
    }
    async with live_stack(options_of(served_model, environment=environment)) as running:
        yield running
        running.assert_clean_logs()


def _phases(received: tuple[ReceivedSpan, ...], request_id: str) -> set[str]:
    """The segments in which a request was when it ended: those that were cut off."""
    trace_id = next(span.trace_id for span in received if span.name == _GATEWAY and span.attributes.get(spans.REQUEST_ID) == request_id)
    trace = [span for span in received if span.trace_id == trace_id and span.name in _ORDER]
    return {span.name for span in trace if span.attributes.get(spans.CANCELLED) or span.status == "ERROR"}


async def _leave(stack: LiveStack, after_s: float, how: str) -> str:
    """One request of one block that is left after this time; returns its id."""
    request_id = f"{how}-{next(_keys)}"
    timeout_s = after_s if how == "deadline" else 20.0
    request = stack.ask([next(_keys) % 300 + 3, 7, 8], timeout_s=timeout_s, max_tokens=2000, request_id=request_id)
    if how == "cancel":
        await asyncio.sleep(after_s)
        request.cancel()
    await request.ended(10)
    assert request.code is (grpc.StatusCode.DEADLINE_EXCEEDED if how == "deadline" else grpc.StatusCode.CANCELLED)
    return request_id


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_client_that_leaves_in_any_phase_leaves_nothing_held(slow: LiveStack, receiver: OtlpReceiver, reference: Reference, how: str) -> None:
    seen: set[str] = set()
    for round_number in range(4):
        moments = [_DELAY_S * (index + 0.25 + 0.2 * round_number) for index in range(10)]
        left = await asyncio.gather(*(_leave(slow, moment, how) for moment in moments))
        await slow.assert_nothing_held(within_s=2.0)
        received = await receiver.wait_for(partial(_has_roots, request_ids=left))
        for request_id in left:
            seen |= _phases(received, request_id)
        if seen == set(_ORDER):
            break
    assert seen == set(_ORDER), f"never left in {set(_ORDER) - seen}"
    again: LiveRequest = await slow.ask([5, 6, 7]).ended()
    assert (again.outcome, again.token_ids) == (("OK", ""), await reference.tokens([5, 6, 7]))
    assert again.trailers["tandem-path"] == "handover"
    await slow.assert_nothing_held()


def _has_roots(received: tuple[ReceivedSpan, ...], *, request_ids: list[str]) -> bool:
    """The gateway's spans are there; the other services exported theirs within the same tenth of a second."""
    return set(request_ids) <= {str(span.attributes.get(spans.REQUEST_ID)) for span in received if span.name == _GATEWAY}
