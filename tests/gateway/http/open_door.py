"""The HTTP door of a house, and clients that speak to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from gateway.http.body_reader import BodyLimits, BodyReader
from gateway.http.connection import ConnectionLimits
from gateway.http.door import http_door
from gateway.http.server import HttpServer
from tests.gateway.house import WAIT_S, House


@dataclass
class OpenDoor:
    """An open HTTP door."""

    house: House
    server: HttpServer
    session: aiohttp.ClientSession
    bodies: BodyReader

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def post(self, path: str = "/v1/completions", /, *, headers: dict[str, str] | None = None, raw: bytes | None = None, **body: Any) -> Any:
        """A POST as a context manager; `raw` in place of a JSON body."""
        body = {"model": "m", "prompt": "hello", **body} if path == "/v1/completions" else body
        content = json.dumps(body).encode() if raw is None else raw
        return self.session.post(self.url + path, data=content, headers={"content-type": "application/json", **(headers or {})})

    async def completion(self, **body: Any) -> dict[str, Any]:
        """A whole answer that must be well."""
        async with self.post(**body) as response:
            assert response.status == 200, await response.text()
            found: dict[str, Any] = await response.json()
            return found

    async def error(self, path: str = "/v1/completions", /, **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, error object and headers of an answer that must be an error."""
        async with self.post(path, **fields) as response:
            content = await response.json()
            assert set(content) == {"error"}
            assert content["error"]["code"] == response.status
            return response.status, content["error"], {name.lower(): value for name, value in response.headers.items()}

    def counted(self, route: str, code: int) -> float:
        return self.house.registry.get_sample_value("tandem_http_server_requests_total", {"http_route": route, "http_code": str(code)}) or 0.0


async def events_of(response: aiohttp.ClientResponse) -> list[Any]:
    """The events of a stream, [DONE] as text."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    text = (await response.read()).decode()
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


@asynccontextmanager
async def open_door(house: House, *, bodies: BodyLimits | None = None, connections: ConnectionLimits | None = None) -> AsyncIterator[OpenDoor]:
    """The door; at the end nothing may be held."""
    reader = BodyReader(bodies or BodyLimits())
    server = http_door(house.gateway, host="127.0.0.1", port=0, bodies=reader, connections=connections, registry=house.registry)
    await server.start()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WAIT_S)) as session:
            yield OpenDoor(house, server, session, reader)
            await house.assert_nothing_held()
    finally:
        async with asyncio.timeout(WAIT_S):
            await server.drain(0.1)
    assert not server.num_connections
