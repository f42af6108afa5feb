"""Every way to leave a stream ends it on the server."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tandem_client import AsyncClient, Cancelled, Client, RetryPolicy, Unavailable
from tests.tandem_client.either import Either
from tests.tandem_client.scripted import Act, ScriptedGateway, cuts, hangs, message, says, serving, then

_WAIT_S = 10.0
_TALKS = then(says(message(0, 5, text="a", seed=7), message(1, 6, text="b")), hangs)


@asynccontextmanager
async def _served(act: Act = _TALKS) -> AsyncIterator[tuple[str, ScriptedGateway]]:
    """Nothing runs on the server at the end, and what was left has been told so."""
    gateway = ScriptedGateway(act)
    async with serving(gateway) as target:
        yield target, gateway
        await asyncio.wait_for(gateway.idle.wait(), _WAIT_S)
        assert (gateway.running, gateway.num_cancelled) == (0, len(gateway.requests))


async def test_leaving_the_with_ends_the_request(kind: str) -> None:
    async with _served() as (target, gateway), Either(kind, target) as client:
        async with client.stream("x") as stream:
            assert (await anext(stream)).text == "a"
        await asyncio.wait_for(gateway.idle.wait(), _WAIT_S)
        with pytest.raises(Cancelled) as raised:
            await stream.completion()
        assert raised.value.tokens_sent == 1


async def test_a_stream_that_is_entered_and_not_read_runs_until_it_is_left(kind: str) -> None:
    async with _served(hangs) as (target, gateway), Either(kind, target) as client, client.stream("x"), asyncio.timeout(_WAIT_S):
        while not gateway.running:  # noqa: ASYNC110  # the scripted server has no event for a beginning
            await asyncio.sleep(0.002)


async def test_cancel_ends_the_request_and_wakes_who_reads(kind: str) -> None:
    async with _served() as (target, gateway), Either(kind, target) as client, client.stream("x") as stream:
        for _ in range(2):
            await anext(stream)
        reading = asyncio.create_task(stream.__anext__())
        await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(reading, _WAIT_S)
        assert len(gateway.requests) == 1


async def test_cancel_wakes_who_waits_for_the_next_attempt(kind: str) -> None:
    gateway = ScriptedGateway(cuts())
    policy = RetryPolicy(initial_wait_s=60.0, max_wait_s=60.0, max_total_wait_s=600.0)
    async with serving(gateway) as target, Either(kind, target, retry=policy) as client, client.stream("x") as stream:
        reading = asyncio.create_task(stream.__anext__())
        async with asyncio.timeout(_WAIT_S):
            while not gateway.requests or gateway.running:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        stream.cancel()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(reading, _WAIT_S)
        assert len(gateway.requests) == 1


async def test_a_break_without_a_with_ends_the_request(kind: str) -> None:
    def leave(target: str, left: threading.Event) -> None:
        with Client(target) as client:
            for piece in client.stream("x"):
                assert piece.text == "a"
                break
            assert left.wait(_WAIT_S), "it runs on"

    async with _served() as (target, gateway):
        if kind == "sync":
            left = threading.Event()
            leaving = asyncio.create_task(asyncio.to_thread(leave, target, left))
            async with asyncio.timeout(_WAIT_S):
                while not gateway.num_cancelled:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            left.set()
            await leaving
            return
        async with AsyncClient(target) as client:
            async for piece in client.stream("x"):
                assert piece.text == "a"
                break
            gc.collect()
            await asyncio.wait_for(gateway.idle.wait(), _WAIT_S)


async def test_a_forgotten_stream_ends_when_nobody_can_read_it(kind: str) -> None:
    async with _served() as (target, gateway), Either(kind, target) as client:
        stream = client.stream("x")
        await anext(stream)
        cycle: list[object] = [stream]
        cycle.append(cycle)
        del stream, cycle
        gc.collect()
        await asyncio.wait_for(gateway.idle.wait(), _WAIT_S)


async def test_a_cancelled_task_ends_the_request_and_stays_cancelled() -> None:
    async with _served() as (target, gateway), AsyncClient(target) as client:
        generating = asyncio.create_task(client.generate("x"))
        async with asyncio.timeout(_WAIT_S):
            while not gateway.running:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating
        await asyncio.wait_for(gateway.idle.wait(), _WAIT_S)


async def test_a_timeout_around_a_stream_ends_the_request() -> None:
    async with _served() as (target, gateway), AsyncClient(target) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.generate("x")
        await asyncio.wait_for(gateway.idle.wait(), _WAIT_S)


async def test_closing_the_client_ends_its_streams_and_takes_no_more(kind: str) -> None:
    async with _served() as (target, gateway):
        async with Either(kind, target) as client:
            stream = client.stream("x")
            await anext(stream)
        with pytest.raises(Cancelled):
            await stream.completion()
        with pytest.raises(RuntimeError, match="closed"):
            await client.generate("x")
        await asyncio.wait_for(gateway.idle.wait(), _WAIT_S)


async def test_nothing_is_sent_before_a_stream_is_read(kind: str) -> None:
    gateway = ScriptedGateway(_TALKS)
    async with serving(gateway) as target, Either(kind, target) as client:
        client.stream("x")
        client.stream("x").cancel()
        assert len(await client.models()) == 1
        assert gateway.requests == []


def test_a_client_of_asyncio_belongs_to_one_loop() -> None:
    client = AsyncClient("127.0.0.1:1", retry=RetryPolicy.never())
    with pytest.raises(Unavailable):
        asyncio.run(client.generate("x"))
    with pytest.raises(RuntimeError, match="one for each loop"):
        asyncio.run(client.generate("x"))
