"""A real RpcServer of raw bytes and a real channel to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from rpc.channels import control_channel
from rpc.server import RpcServer
from telemetry.metrics import RpcMetrics

SERVICE = "tandem.test.Echo"
_HANDLERS: Mapping[str, Callable[[Any], Any]] = {
    "UnaryUnary": grpc.unary_unary_rpc_method_handler,
    "UnaryStream": grpc.unary_stream_rpc_method_handler,
    "StreamUnary": grpc.stream_unary_rpc_method_handler,
    "StreamStream": grpc.stream_stream_rpc_method_handler,
    "ReadKv": grpc.unary_stream_rpc_method_handler,
    "WatchLoad": grpc.unary_stream_rpc_method_handler,
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A running server and a channel to it."""

    server: RpcServer
    channel: grpc.aio.Channel

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Starts an RPC by the name of its kind."""
        kind = {"ReadKv": "unary_stream", "WatchLoad": "unary_stream"}.get(name) or "".join("_" + c.lower() if c.isupper() else c for c in name)[1:]
        return method(self.channel, kind, f"/{SERVICE}/{name}")(*arguments, **options)


def method(channel: grpc.aio.Channel, kind: str, path: str) -> Any:
    """A method of raw bytes, such as kind unary_stream."""
    return getattr(channel, kind)(path)


@asynccontextmanager
async def serving(*, metrics: RpcMetrics | None = None, **behaviours: Any) -> AsyncIterator[Pair]:
    """Serves behaviours under the names of their kinds, such as UnaryUnary."""
    server = RpcServer("test", metrics=metrics)
    methods = {name: _HANDLERS[name](behaviour) for name, behaviour in behaviours.items()}
    server.add_generic([grpc.method_handlers_generic_handler(SERVICE, methods)])
    port = await server.start()
    channel = control_channel(f"127.0.0.1:{port}")
    try:
        yield Pair(server, channel)
    finally:
        await channel.close()
        await server.drain(0.1)
