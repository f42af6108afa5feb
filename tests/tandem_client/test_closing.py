"""A client that is closed while its calls run: each ends with Cancelled, whatever it was waiting for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rpc.errors import exhausted, invalid_argument
from tandem_client import Cancelled, InvalidRequest, RetryPolicy
from tests.tandem_client.either import Either
from tests.tandem_client.scripted import ScriptedGateway, hangs, refuses, serving

_WAIT_S = 5.0
_LONG = RetryPolicy(max_attempts=100, initial_wait_s=60.0, max_wait_s=60.0, max_total_wait_s=1000.0)


async def _until(gateway: ScriptedGateway) -> None:
    async with asyncio.timeout(_WAIT_S):
        while not gateway.metadata:  # noqa: ASYNC110 # of a server that has no event for it
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("act", [hangs, refuses(exhausted("QUEUE_FULL", "later", 60.0))], ids=["in flight", "in a wait"])
async def test_a_question_ends_with_cancelled_when_its_client_is_closed(act: Any, kind: str) -> None:
    gateway = ScriptedGateway(act, act)
    async with serving(gateway) as target:
        async with Either(kind, target, retry=_LONG) as client:
            asking = asyncio.create_task(client.models())
            await _until(gateway)
            await asyncio.sleep(0.05)  # the refusal is there, too
        with pytest.raises(Cancelled):
            await asyncio.wait_for(asking, _WAIT_S)


async def test_a_question_that_its_own_task_cancels_stays_cancelled() -> None:
    gateway = ScriptedGateway(hangs, hangs)
    async with serving(gateway) as target, Either("asyncio", target) as client:
        asking = asyncio.create_task(client.models())
        await _until(gateway)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_a_stream_that_a_closed_client_would_begin_is_cancelled(kind: str) -> None:
    async with serving(ScriptedGateway(hangs)) as target:
        async with Either(kind, target) as client:
            stream = client.stream("x")
        with pytest.raises(Cancelled):
            async with stream:
                pass


async def test_a_number_of_samples_costs_nothing_before_the_gateway_has_taken_it(kind: str) -> None:
    refusal = refuses(invalid_argument("sampling_params.n", "is too large"))
    async with serving(ScriptedGateway(refusal)) as target, Either(kind, target) as client:
        with pytest.raises(InvalidRequest):
            await client.generate("x", n=(1 << 32) - 1)
