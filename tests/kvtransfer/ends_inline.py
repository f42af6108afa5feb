"""`inline` in the contract suite: a real server, a real channel."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvtransfer.budget import ProgressLimit
from kvtransfer.errors import HandoverError
from kvtransfer.inline import InlineReader, InlineSource
from rpc.channels import data_channel
from tandem.v1 import prefill_pb2
from tests.kvtransfer.kinds import Opened, TwoPools, kind, serving


@kind("inline", one_sided=False)
@asynccontextmanager
async def open_inline(two: TwoPools) -> AsyncIterator[Opened]:
    """Every message goes through the gate."""
    source = InlineSource(two.pool, two.holds, chunk_bytes=two.chunk_bytes)

    async def read_kv(request: prefill_pb2.ReadKvRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async def write(message: bytes) -> None:
            await two.gate.pass_on_loop()
            for mangled in two.mangle[0](message) if two.mangle else [message]:
                await context.write(mangled)

        try:
            await source.send(request, write)
        except HandoverError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    handler: grpc.RpcMethodHandler[prefill_pb2.ReadKvRequest, bytes] = grpc.unary_stream_rpc_method_handler(read_kv, prefill_pb2.ReadKvRequest.FromString, None)
    async with serving({"ReadKv": handler}) as (target, server):
        channel = data_channel(target)

        async def dies() -> None:
            await server.stop(None)

        try:
            yield Opened(source, lambda: InlineReader(channel, new_progress_limit=lambda: ProgressLimit(window_s=5.0, min_bytes=64)), dies)
        finally:
            await channel.close()
