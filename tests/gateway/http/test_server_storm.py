"""Clients that leave at any moment, many at the same time: nothing stays behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from gateway.limits import AdmissionLimits
from gateway.served_model import ServedModel
from tandem.v1 import generation_pb2
from tests.gateway.fake_decode import LENGTH, FakeDecode, Request, Response
from tests.gateway.house import WAIT_S, house
from tests.gateway.http.open_door import OpenDoor, open_door
from tests.gateway.http.test_server_ends import request_bytes

_NUM_CLIENTS = 200


async def _serves(_: FakeDecode, request: Request, context: Any) -> None:
    for position in range(16):
        finish = generation_pb2.Finish(finish_reason=LENGTH) if position == 15 else None
        await context.write(Response(token_ids=[5], position=position, finish=finish))
        await asyncio.sleep(0.001)


async def _one(door: OpenDoor, chance: random.Random) -> bool:
    """Whether it stayed to the end."""
    prompt = "x" * chance.choice((1, 1, 5_000))
    sent = request_bytes(prompt=prompt if len(prompt) < 100 else "x " * 200, stream=chance.random() < 0.5, user=prompt)
    patience = chance.choice((0, 5, 20, 100, 300, 10**6))
    reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
    writer.write(sent[: chance.choice((len(sent), len(sent), len(sent), 30, len(sent) - 3))] if patience < 10**6 else sent)
    reading = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    try:
        for _ in range(min(patience, 300)):
            await asyncio.sleep(0)
        if patience < 10**6:
            return False
        async with asyncio.timeout(WAIT_S):
            head = await reading
            assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 429")), head
            return True
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        writer.transport.abort()


async def test_two_hundred_clients_that_leave_at_any_moment_leave_nothing(model: ServedModel) -> None:
    chance = random.Random(5)
    limits = AdmissionLimits(max_active_requests=8, max_queue_requests=64)
    async with house(model, _serves, admission=limits) as h, open_door(h) as door:
        stayed = await asyncio.gather(*(_one(door, random.Random(chance.random())) for _ in range(_NUM_CLIENTS)))
        assert 0 < sum(stayed) < _NUM_CLIENTS
        await h.until(lambda: door.server.num_connections == 0)
        await h.assert_nothing_held()
        assert door.bodies.num_held_bytes == 0
        assert h.registry.get_sample_value("tandem_http_server_active", {"http_route": "/v1/completions"}) == 0
        assert (await door.completion())["usage"]["completion_tokens"] == 16
