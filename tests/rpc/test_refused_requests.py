"""A refused request is gone when its RPC is: nothing waits for a full collection, which may be a long time coming."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from rpc.errors import invalid_argument
from rpc.server import RpcServer


class Message:
    """A request that can be referenced weakly."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


@pytest.fixture
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
@pytest.mark.parametrize("where", ["while it is parsed", "by its handler"])
async def test_a_refused_request_leaves_no_cycle_behind(where: str) -> None:
    seen: list[weakref.ref[Message]] = []

    def parse(raw: bytes) -> Message:
        message = Message(raw)
        seen.append(weakref.ref(message))
        if where == "while it is parsed":
            raise invalid_argument("it", "is refused")
        return message

    async def handler(request: Message, context: Any) -> bytes:
        raise invalid_argument("it", "is refused")

    server = RpcServer("server")
    handlers: Any = {"Call": grpc.unary_unary_rpc_method_handler(handler, request_deserializer=parse)}
    server.add_generic((grpc.method_handlers_generic_handler("tandem.v1.DecodeService", handlers),))
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/tandem.v1.DecodeService/Call")
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"x" * 1000)
    async with asyncio.timeout(5):
        while server.num_active_rpcs:  # noqa: ASYNC110 # the server announces no end
            await asyncio.sleep(0.001)
    await server.drain(0.1)
    assert len(seen) == 1
    assert seen[0]() is None
