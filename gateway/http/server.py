"""The HTTP door's listening port, in the gateway's event loop: no signal handlers, no log settings and no process of uvicorn's own."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from gateway.http.connection import ConnectionLimits, HttpConnection
from gateway.http.running import RunningRequests
from rpc.errors import StartupError

_LOG = logging.getLogger(__name__)
_BACKLOG: Final = 2048
_MAX_HEAD_BYTES: Final = 64 << 10
# For answers that are on their way when the last request has ended.
_SETTLE_S: Final = 1.0
_PROBES: Final = ((socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1), (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 15), (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 5))
"""A client whose machine has vanished is found within a minute; accepted sockets take this over from the listening one."""


class HttpServer:
    """Construct it on the event loop; it serves from `start` to the end of `drain`."""

    def __init__(self, app: ASGIApp, running: RunningRequests, *, host: str, port: int, limits: ConnectionLimits) -> None:
        self.port = port
        self._running = running
        self._host = host
        self._limits = limits
        self._state = ServerState()
        self._config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(limits.max_idle_s),
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        )
        self._listener: asyncio.Server | None = None
        self._all_gone = asyncio.Event()

    @property
    def num_connections(self) -> int:
        """Open ones."""
        return len(self._state.connections)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """Listening ones."""
        return self._listener.sockets if self._listener is not None else ()

    async def start(self) -> int:
        """Binds, serves, and returns the bound port. Raises StartupError when the address cannot be bound."""
        self._config.load()
        listening = _bind(self._host, self.port)
        self.port = listening.getsockname()[1]
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connection, sock=listening, backlog=_BACKLOG)
        address = f"[{self._host}]" if ":" in self._host else self._host
        _LOG.info("gateway serves HTTP at http://%s:%d", address, self.port)
        return self.port

    async def drain(self, grace_s: float) -> bool:
        """New requests are refused, running ones waited for; after `grace_s` the rest ends with an error. Then all connections are closed.

        True when nothing had to be ended.
        """
        self._running.draining = True
        _LOG.info("the HTTP door drains %d requests", self._running.num_running)
        finished = await self._running.wait_until_idle(grace_s)
        if not finished:
            _LOG.warning("%d HTTP requests that did not end in %g s are ended", self._running.num_running, grace_s)
            self._running.end_all()
            await self._running.wait_until_idle(_SETTLE_S)
        await self._close()
        return finished

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._config, self._state, self._limits, self._connection_lost)

    def _connection_lost(self) -> None:
        if self._state.connections:
            self._all_gone.clear()
        else:
            self._all_gone.set()

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        try:
            self._connection_lost()
            await asyncio.wait_for(self._all_gone.wait(), _SETTLE_S)
        except TimeoutError:
            _LOG.info("%d HTTP connections are cut: their clients do not take the end of their answers", self.num_connections)
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in self._state.tasks:
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)


def _bind(host: str, port: int) -> socket.socket:
    """Raises StartupError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"--http-host: cannot listen on {host}: {error.strerror or error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option, level, value in _PROBES:
            listening.setsockopt(level, option, value)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise StartupError(f"--http-port: cannot listen on {host}:{port}: {error.strerror or error}") from None
    listening.setblocking(False)
    return listening
