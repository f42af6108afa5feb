"""A gRPC server as every Tandem service has it: options, health, reflection, the interceptor, drain."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rpc.channels import SERVER_OPTIONS
from rpc.errors import StartupError
from rpc.interceptor import CallInterceptor
from telemetry.metrics import RpcMetrics

_LOG = logging.getLogger(__name__)
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
# For statuses that are on their way when the last handler has returned, and for handlers that were cancelled.
_SETTLE_S: Final = 1.0


def check_address(host: str, port: int) -> None:
    """Raises StartupError when the address cannot be bound now: for a service that would otherwise find out only after loading for seconds."""
    if port == 0:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise StartupError(f"--port: cannot listen on {host}:{port}: {error.strerror or error}") from None


class RpcServer:
    """One listening port. Construct it on the event loop that serves it.

    Health: the empty name is liveness (the process answers), each service's full name is readiness, NOT_SERVING until `set_ready(True)`.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        reflection: bool = True,
        metrics: RpcMetrics | None = None,
        max_concurrent_rpcs: int | None = None,
    ) -> None:
        self.name = name
        self.port = port
        self.not_ready_reason = "starting"
        self._host = host
        self._reflection = reflection
        self._services: list[str] = []
        self._calls = CallInterceptor(metrics)
        self._server = grpc.aio.server(interceptors=(self._calls,), options=SERVER_OPTIONS, maximum_concurrent_rpcs=max_concurrent_rpcs)
        self._health = health.aio.HealthServicer()
        self._health_updates: set[asyncio.Task[None]] = set()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, add_servicer: Callable[[Any, grpc.aio.Server], None], servicer: object, full_service_name: str) -> None:
        """Registers a servicer by its generated `add_..._to_server` function; before `start`."""
        add_servicer(servicer, self._server)
        self._services.append(full_service_name)

    def add_generic(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Registers generic handlers, such as one of raw bytes; before `start`."""
        self._server.add_generic_rpc_handlers(tuple(handlers))

    async def start(self) -> int:
        """Binds, serves, and returns the bound port. Raises StartupError when the address cannot be bound."""
        for service in self._services:
            await self._health.set(service, _NOT_SERVING)
        if self._reflection:
            names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        address = f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise StartupError(f"cannot listen on {address}: the port is taken or the address is not this machine's") from None
        await self._server.start()
        _LOG.info("%s listens on %s:%d", self.name, self._host, self.port)
        return self.port

    def set_ready(self, ready: bool, reason: str = "") -> None:
        """Sets readiness. `reason` says why not, for the log and for status pages. Without effect once draining."""
        if self.draining:
            return
        self.not_ready_reason = "" if ready else reason
        _LOG.info("%s is %s", self.name, "ready" if ready else f"not ready: {reason}")
        for service in self._services:
            self._update_health(service, _SERVING if ready else _NOT_SERVING)

    def _update_health(self, service: str, status: Any) -> None:
        # Tasks run in the order in which they were made, and the servicer's lock is first come, first served: the last word stays the last.
        task = asyncio.get_running_loop().create_task(self._health.set(service, status))
        self._health_updates.add(task)
        task.add_done_callback(self._health_updates.discard)

    @property
    def num_active_rpcs(self) -> int:
        """Requests whose RPC has not ended; watches, reports and KV reads are not counted."""
        return self._calls.num_requests

    @property
    def draining(self) -> bool:
        """New requests are refused."""
        return self._calls.draining

    async def drain(self, grace_s: float) -> bool:
        """Readiness off, new requests refused with UNAVAILABLE DRAINING, running ones waited for; then the server stops.

        After `grace_s` the rest is cancelled and gets UNAVAILABLE DRAINING. True when nothing had to be cancelled.
        """
        self._calls.draining = True
        self.not_ready_reason = "draining"
        await self._health.enter_graceful_shutdown()
        _LOG.info("%s drains %d requests for at most %g s", self.name, self.num_active_rpcs, grace_s)
        finished = await self._calls.wait_for_requests(grace_s)
        if not finished:
            _LOG.warning("%s cancels %d requests that did not end in %g s", self.name, self.num_active_rpcs, grace_s)
        self._calls.end_all()
        await self._server.stop(_SETTLE_S)
        return finished
