"""Connections that are used in ways that are allowed and rare: pipelining, slow readers of a second answer, upgrades that nobody grants."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.http.connection import ConnectionLimits
from gateway.served_model import ServedModel
from tests.gateway.fake_decode import hangs, tokens
from tests.gateway.house import WAIT_S, house
from tests.gateway.http.open_door import open_door
from tests.gateway.http.test_server_ends import connect, leave, request_bytes

_NUM_PAGES = 3
_MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """Body of an answer that must be well."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    size = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return await reader.readexactly(int(size.split(b":")[1]))


async def test_a_client_that_has_sent_a_second_request_ahead_and_leaves_ends_the_first(model: ServedModel) -> None:
    async with house(model, hangs) as h, open_door(h) as door:
        _, writer = await connect(door)
        writer.write(request_bytes())
        await h.until(lambda: h.decodes[0].num_running == 1)
        writer.write(_MODELS)
        await asyncio.sleep(0.1)  # it is there
        await leave(writer)
        async with asyncio.timeout(WAIT_S / 4):
            await h.until(lambda: door.counted("/v1/completions", 499) == 1)


async def test_requests_that_were_sent_ahead_are_answered_in_order(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h) as door:
        reader, writer = await connect(door)
        writer.write(_MODELS + request_bytes() + _MODELS)
        for path in (b'"object":"list"', b'"object":"text_completion"', b'"object":"list"'):
            assert path in await _answer(reader)
        await leave(writer)


async def test_each_answer_has_its_own_time_to_be_taken(model: ServedModel) -> None:
    """A second one is not cut when the first one's time is over."""
    limits = ConnectionLimits(max_flush_s=1.5)
    async with house(model, hangs) as h, open_door(h, connections=limits) as door:
        door.server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        reader, writer = await connect(door, receive_buffer=4096)
        loop = asyncio.get_running_loop()
        writer.write(_MODELS)
        await _answer(reader)
        began = loop.time()
        await asyncio.sleep(1.0)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * _NUM_PAGES)
        await h.until(
            lambda: (h.registry.get_sample_value("tandem_http_server_requests_total", {"http_route": "/metrics", "http_code": "200"}) or 0) == _NUM_PAGES
        )
        assert any(connection.transport.get_write_buffer_size() for connection in door.server._state.connections), "more than the sockets take"
        await asyncio.sleep(began + 2.0 - loop.time())  # the first one's time is over, not the second one's
        async with asyncio.timeout(WAIT_S):
            for _ in range(_NUM_PAGES):
                assert b"server_requests" in await _answer(reader)
        await leave(writer)


async def test_an_upgrade_that_is_not_granted_changes_nothing(model: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    async with house(model, tokens([5])) as h, open_door(h) as door:
        reader, writer = await connect(door)
        asked = request_bytes().replace(
            b"host: x\r\n", b"host: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
        )
        for _ in range(2):
            writer.write(asked)
            async with asyncio.timeout(WAIT_S / 2):
                assert b"text_completion" in await _answer(reader)
        await leave(writer)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
