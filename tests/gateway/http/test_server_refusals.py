"""Every row of the table of bad HTTP, and clients that are slow, many or large: refused in the error shape, and nothing reaches a worker."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.http.body_reader import BodyLimits
from gateway.http.connection import ConnectionLimits
from gateway.served_model import ServedModel
from tests.gateway.fake_decode import tokens
from tests.gateway.house import WAIT_S, house
from tests.gateway.http.bad_http import BAD_HTTP, BadHttp
from tests.gateway.http.open_door import OpenDoor, open_door

_LIMITS = BodyLimits(max_bytes=65536, max_bytes_of_all=100_000, max_time_s=0.3)


async def exchange(door: OpenDoor, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the first answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
    try:
        writer.write(sent)
        return await answer_of(reader)
    finally:
        writer.transport.abort()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(WAIT_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


@pytest.mark.parametrize("row", BAD_HTTP, ids=str)
async def test_bad_http_is_refused_in_openais_shape(row: BadHttp, model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h, bodies=_LIMITS) as door:
        code, headers, body = await exchange(door, row.sent)
        error = json.loads(body)["error"]
        assert (code, error["code"]) == (row.code, row.code)
        assert row.words in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert headers["content-type"] == "application/json"
        assert headers["x-should-retry"] == "false"
        assert h.decodes[0].requests == []


def test_the_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in BAD_HTTP}) == len(BAD_HTTP)


async def test_a_refused_body_is_counted_and_its_connection_serves_on(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h, bodies=_LIMITS) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
        bad, good = b'{"model":"m","prompt":1}', b'{"model":"m","prompt":"hi"}'
        for content, code in ((bad, 400), (b" " * 70_000, 413), (good, 200)):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
            assert (await answer_of(reader))[0] == code
        await h.until(lambda: door.counted("/v1/completions", 200) == 1)
        assert (door.counted("/v1/completions", 400), door.counted("/v1/completions", 413)) == (1, 1)
        writer.transport.abort()


async def test_a_client_that_waits_for_100_continue_is_refused_before_it_sends(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h, bodies=_LIMITS) as door:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n"
        assert (await exchange(door, head))[0] == 413


async def test_a_slow_body_is_given_up(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h, bodies=_LIMITS) as door:
        code, headers, body = await exchange(door, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert (code, headers["connection"]) == (408, "close")
        assert "did not arrive within 0.3 s" in json.loads(body)["error"]["message"]
        await h.until(lambda: door.server.num_connections == 0)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_headers_that_do_not_come_are_given_up(sent: bytes, model: ServedModel) -> None:
    limits = ConnectionLimits(max_head_s=0.2)
    async with house(model, tokens([5])) as h, open_door(h, connections=limits) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
        writer.write(sent)
        if sent.startswith(b"GET"):
            assert (await answer_of(reader))[0] == 200
            writer.write(b"GET /hea")
        assert (await answer_of(reader))[0] == 408
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
        await h.until(lambda: door.server.num_connections == 0)
        writer.close()


async def test_a_connection_too_many_is_told_to_come_back(model: ServedModel) -> None:
    async with house(model, tokens([5])) as h, open_door(h, connections=ConnectionLimits(max_connections=2)) as door:
        writers = [(await asyncio.open_connection("127.0.0.1", door.server.port))[1] for _ in range(2)]
        await h.until(lambda: door.server.num_connections == 2)
        code, headers, _ = await exchange(door, b"")
        assert (code, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        for writer in writers:
            writer.transport.abort()
        await h.until(lambda: door.server.num_connections == 0)
        assert (await exchange(door, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200


async def test_bodies_that_are_too_many_together_are_told_to_come_back(model: ServedModel) -> None:
    limits = BodyLimits(max_bytes=65536, max_bytes_of_all=100_000, max_time_s=WAIT_S)
    async with house(model, tokens([5])) as h, open_door(h, bodies=limits) as door:
        held = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 65536\r\n\r\n" + b" " * 60_000)
            held.append((reader, writer))
        answers = [asyncio.create_task(answer_of(reader)) for reader, _ in held]
        [refused], _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        code, headers, _ = refused.result()
        assert (code, headers["retry-after"]) == (429, "1")
        for task, (_, writer) in zip(answers, held, strict=True):
            task.cancel()
            writer.transport.abort()
        await h.until(lambda: door.server.num_connections == 0)
        assert (await exchange(door, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200


async def test_a_client_that_does_not_take_the_end_of_its_answer_is_cut(model: ServedModel) -> None:
    limits = ConnectionLimits(max_flush_s=0.3, max_idle_s=1.0)
    async with house(model, tokens([5])) as h, open_door(h, connections=limits) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.server.port, limit=1024)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)  # answers of megabytes, never read
        reader._transport.pause_reading()  # type: ignore[attr-defined] # no public way
        await h.until(lambda: door.server.num_connections == 1)
        await h.until(lambda: door.server.num_connections == 0)
        writer.transport.abort()
