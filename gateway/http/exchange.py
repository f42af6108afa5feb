"""One HTTP request and its answer: headers once, then a body or events, whatever happens on the way."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from typing import Any, Final, Protocol, cast

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from gateway.http.errors import CLIENT_CLOSED, HttpError, payload
from gateway.validation import is_request_id

_LOG = logging.getLogger(__name__)
CONNECTION: Final = "tandem.connection"
"""Where in the scope's state the connection stands."""
_MAX_ID_CHARS: Final = 120
"""Of a client's request id: the ids of several prompts are made of it."""
_LAST_WORD_S: Final = 1.0
"""For the error at the end of a stream that its client may have stopped reading."""
_SSE: Final = ("content-type", "text/event-stream; charset=utf-8")
DONE: Final = b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + payload(content) + b"\n\n"


def events(contents: Iterable[Mapping[str, Any]]) -> bytes:
    """Server-sent events, one behind the other."""
    return b"".join(map(event, contents))


class Connection(Protocol):
    """The transport below, for what ASGI has no word for."""

    def abort(self) -> None:
        """Ends it at once, without what is still to be sent."""


class Exchange:
    """Lives in the task that serves it; `events` may be called by several tasks at the same time."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.headers = Headers(scope=scope)
        given = self.headers.get("x-request-id", "")
        self.request_id = given if is_request_id(given, _MAX_ID_CHARS) else secrets.token_hex(16)
        self.code = 0
        """What was sent, or what the end of a stream came to; 0 until then."""
        self._send = send
        self._streaming = False
        self._ended = False
        self._sending = asyncio.Lock()

    @property
    def started(self) -> bool:
        """The status line has gone out."""
        return self.code != 0

    async def send(self, message: Message) -> None:
        """ASGI's, for answers of starlette's own."""
        starts = message["type"] == "http.response.start"
        if starts:
            own = ((b"date", formatdate(usegmt=True).encode()), (b"x-request-id", self.request_id.encode()))
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await self._send(message)
        self.code = message["status"] if starts else self.code
        self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def json(self, content: Mapping[str, Any], code: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
        """A whole answer."""
        await self.whole(payload(content), "application/json", code, headers)

    async def whole(self, body: bytes, content_type: str, code: int = 200, headers: Iterable[tuple[str, str]] = ()) -> None:
        """A whole answer in bytes."""
        await self._start(code, [("content-type", content_type), ("content-length", str(len(body))), *headers])
        await self.send({"type": "http.response.body", "body": body})

    async def events(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Server-sent events; the first of them sends the headers. Returns when the transport has room again, which bounds what a slow reader costs."""
        if not body:
            return
        async with self._sending:
            if not self.started:
                self._streaming = True
                await self._start(200, [_SSE, ("cache-control", "no-cache"), ("x-accel-buffering", "no"), *headers.items()])
            await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def done(self) -> None:
        """The end of a stream that is whole."""
        await self.send({"type": "http.response.body", "body": DONE})

    async def fail(self, error: HttpError) -> None:
        """The error as a status where that still can be sent, else as an event and the end of the stream. Never waits for a reader."""
        if self._ended:
            return
        started, self.code = self.started, error.code
        if error.code == CLIENT_CLOSED:
            return
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                if not started:
                    await self.json(error.body(), error.code, error.all_headers())
                elif self._streaming:
                    await self.send({"type": "http.response.body", "body": event(error.body())})
        except TimeoutError:
            _LOG.info("a client that reads nothing is given up")
        finally:
            if not self._ended:
                self._abort()

    def _abort(self) -> None:
        cast(Connection, self.scope["state"][CONNECTION]).abort()

    async def _start(self, code: int, headers: list[tuple[str, str]]) -> None:
        encoded = [(name.encode(), value.encode("ascii", "replace")) for name, value in headers]
        await self.send({"type": "http.response.start", "status": code, "headers": encoded})


_EXCHANGE: Final = "tandem.exchange"


def open_exchange(scope: Scope, receive: Receive, send: Send) -> Exchange:
    """A request's, which its routes find in the scope."""
    exchange: Exchange = scope.setdefault(_EXCHANGE, Exchange(scope, receive, send))
    return exchange


def exchange_of(scope: Scope) -> Exchange:
    """The request's."""
    exchange: Exchange = scope[_EXCHANGE]
    return exchange
