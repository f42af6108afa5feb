"""A connection of the HTTP door: uvicorn's, with every wait bounded and every refusal in OpenAI's error JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.http.errors import HttpError, payload
from gateway.http.exchange import CONNECTION

_RETRY_AFTER_S: Final = 1.0
_MAX_AHEAD_BYTES: Final = 64 << 10
"""Of requests that a client sends while one of its own is being answered; beyond them it waits."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of one connection, and how many there may be."""

    max_connections: int = 4096
    max_head_s: float = 10.0
    """From the connection's start, or a later request's first byte, to the end of its headers; also how long a body that was refused is read on."""
    max_idle_s: float = 75.0
    """Between two requests: longer than clients keep theirs, so that it is they who close."""
    max_flush_s: float = 30.0
    """For the client to take the last bytes of an answer."""


class HttpConnection(H11Protocol):
    """On the event loop. uvicorn bounds the time between two requests, but neither that of headers nor that of the last bytes' way to the client."""

    def __init__(self, config: Config, state: ServerState, limits: ConnectionLimits, on_lost: Callable[[], None]) -> None:
        super().__init__(config, state, {CONNECTION: self})
        self._on_lost = on_lost
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A new one is told to come back when there are too many."""
        super().connection_made(transport)  # type: ignore[arg-type] # a TCP server's is a Transport
        if len(self.connections) > self._limits.max_connections:
            self._refuse(HttpError(503, "too many connections", retry_after_s=_RETRY_AFTER_S))
            return
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing of it stays."""
        super().connection_lost(exc)
        for timer in (self._head_timer, self._flush_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """Headers, or a body."""
        super().data_received(data)
        self._watch_head()
        if self.flow.read_paused and self._is_answering() and not self.cycle.more_body and len(self.conn.trailing_data[0]) <= _MAX_AHEAD_BYTES:
            self.flow.resume_reading()  # requests that were sent ahead wait; a transport that is not read does not see its client leave

    def on_response_complete(self) -> None:
        """An answer has been handed to the transport, which is not to say that its client takes it."""
        super().on_response_complete()
        self._watch_flush()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        self._refuse(HttpError(400, msg))

    def abort(self) -> None:
        """Ends it at once, without what is still to be sent."""
        self._disconnect_cycle()
        self.transport.abort()

    def _refuse(self, error: HttpError) -> None:
        """An answer that no application has a part in, and the end."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = payload(error.body())
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close"), *error.all_headers()]
            parts: list[Any] = [h11.Response(status_code=error.code, headers=headers), h11.Data(data=body), h11.EndOfMessage()]
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self._disconnect_cycle()
        self.transport.close()
        self._watch_flush()

    def _should_upgrade(self) -> bool:
        """No protocol is changed to; uvicorn would advise to install one, in two warnings for each request that offers it."""
        return False

    def _disconnect_cycle(self) -> None:
        """What the transport will say in a moment, for a request that goes on until then."""
        if self._is_answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None until the first request, whatever uvicorn's types say
        return cycle is not None and not cycle.response_complete

    def _watch_head(self) -> None:
        """While nothing is being answered, and the time between two requests does not run, a request's headers are due."""
        if self._is_answering() or self.timeout_keep_alive_task is not None or self.transport.is_closing():
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.max_head_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._is_answering() and not self.transport.is_closing():
            self._refuse(HttpError(408, f"no request within {self._limits.max_head_s:g} s"))

    def _watch_flush(self) -> None:
        """Of the last answer's end; that of one before it has been taken, or is in front of this one's."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._flush_timer = self.loop.call_later(self._limits.max_flush_s, self._flushed_or_aborted)

    def _flushed_or_aborted(self) -> None:
        self._flush_timer = None
        if self.transport.is_closing() or (not self._is_answering() and self.transport.get_write_buffer_size()):
            self.transport.abort()
