"""`nixl` in the contract suite, in both directions: real agents on the loopback interface, a real WriteKv."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import grpc

from kvtransfer.errors import HandoverError, HandoverProtocolError
from kvtransfer.memories import HostBlocks
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.nixl_pieces import Pieces
from kvtransfer.nixl_reader import NixlReader
from kvtransfer.nixl_settings import Direction, NixlSettings
from kvtransfer.nixl_source import NixlSource
from rpc.channels import control_channel
from tandem.v1 import prefill_pb2
from tests.kvtransfer.kinds import Gate, Opened, TwoPools, kind, serving

MISSING = "" if importlib.util.find_spec("nixl_cu13") else "nixl is not installed"
TLS: dict[Direction, str] = {"write": "tcp", "read": "tcp,cma"}
"""Reads are one-sided by the kernel's copy between processes; over TCP they are not."""


@contextmanager
def ucx_tls(tls: str) -> Iterator[None]:
    """For the agents that are made meanwhile."""
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = tls
    try:
        yield
    finally:
        if before is None:
            del os.environ["UCX_TLS"]
        else:
            os.environ["UCX_TLS"] = before


def _gated(gate: Gate) -> type[NixlAgent]:
    class GatedAgent(NixlAgent):
        async def transfer(self, operation: Literal["READ", "WRITE"], peer: str, own: Pieces, remote: Pieces) -> None:
            await gate.pass_on_loop()
            await super().transfer(operation, peer, own, remote)
            gate.middle()

    return GatedAgent


@asynccontextmanager
async def _open(two: TwoPools, direction: Direction) -> AsyncIterator[Opened]:
    settings = NixlSettings(net_devices="lo", direction=direction)
    digests = ThreadPoolExecutor(1)
    with ucx_tls(TLS[direction]):
        source = NixlSource(two.pool, two.holds, digests, settings)
        pairings: dict[str, Any] = {}
        offer = source.offer

        async def remembered(pairing: Any) -> Any:
            pairings[pairing.pairing_id] = pairing
            return await offer(pairing)

        source.offer = remembered  # type: ignore[method-assign] # the servicer's part: a request's pairing by its id

        async def write_kv(request: prefill_pb2.WriteKvRequest, context: grpc.aio.ServicerContext[Any, Any]) -> prefill_pb2.WriteKvResponse:
            context.set_trailing_metadata((("tandem-stopped", "1"),))
            await two.gate.pass_on_loop()
            try:
                return await source.write(request, pairings[request.pairing_id])
            except HandoverProtocolError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except HandoverError as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

        handler: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(
            write_kv, prefill_pb2.WriteKvRequest.FromString, prefill_pb2.WriteKvResponse.SerializeToString
        )
        async with serving({"WriteKv": handler}) as (target, server):
            channel = control_channel(target)

            def new_reader() -> NixlReader:
                return NixlReader(_blocks(two), two.executor, channel, settings, new_agent=_gated(two.gate))

            async def dies() -> None:
                await server.stop(None)
                source.close()

            try:
                yield Opened(source, new_reader, dies)
            finally:
                source.close()
                await channel.close()
                digests.shutdown()


def _blocks(two: TwoPools) -> HostBlocks:
    return HostBlocks(two.decode.kv_cache.blocks)


@kind("nixl_read", one_sided=True, missing=MISSING)
@asynccontextmanager
async def open_nixl_read(two: TwoPools) -> AsyncIterator[Opened]:
    """The gate is before every transfer of decode's."""
    async with _open(two, "read") as opened:
        yield opened


@kind("nixl_write", one_sided=False, missing=MISSING)
@asynccontextmanager
async def open_nixl_write(two: TwoPools) -> AsyncIterator[Opened]:
    """The gate is in the handler of WriteKv."""
    async with _open(two, "write") as opened:
        yield opened
