"""A process for the keepalive test: `serve`, or `call PORT`, one silent stream; says on standard output what it sees."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from rpc.channels import control_channel
from rpc.server import RpcServer

PATH = "/tandem.test.Frozen/Hold"


async def serve() -> None:
    async def hold(_request: bytes, context: Any) -> None:
        await context.write(b"held")
        try:
            await asyncio.Event().wait()
        finally:
            print("released", flush=True)

    server = RpcServer("frozen", reflection=False)
    server.add_generic([grpc.method_handlers_generic_handler("tandem.test.Frozen", {"Hold": grpc.unary_stream_rpc_method_handler(hold)})])
    print(await server.start(), flush=True)
    await asyncio.Event().wait()


async def call(port: str) -> None:
    async with control_channel(f"127.0.0.1:{port}") as channel:
        hold: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(PATH)
        stream = hold(b"")
        await stream.read()
        print("holding", flush=True)
        try:
            await stream.read()
        except grpc.aio.AioRpcError as error:
            print(error.code().name, flush=True)


asyncio.run(serve() if sys.argv[1] == "serve" else call(sys.argv[2]))
