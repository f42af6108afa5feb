"""Both ends of `nixl` without engines, each of which can be a process of its own: `python -m tests.kvtransfer.nixl_peer prefill|decode`.

A pool of 2 MiB blocks and one hold per pairing on all of them. The prefill process prints its port; the decode process prints a line after each hand-over.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from engine.kv_cache import HostKvCache, KvLayout
from engine.proto import kv_layout_to_proto
from kvtransfer.errors import HandoverError, HandoverProtocolError, HoldUnknownError, NoTransportError
from kvtransfer.hold import Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.memories import HostBlocks
from kvtransfer.nixl_reader import NixlReader
from kvtransfer.nixl_settings import Direction, NixlSettings
from kvtransfer.nixl_source import NixlSource
from kvtransfer.pairing import NONCE_BYTES, PROCESS_ID, Pairing, boot_id
from kvtransfer.quarantine import Quarantine
from kvtransfer.transport import Rows
from rpc.channels import control_channel
from tandem.v1 import kv_pb2, prefill_pb2

LAYOUT = KvLayout("model", "float32", 8, 8, 64, 64)
NUM_BLOCKS = 32
_SERVICE = "/tandem.v1.PrefillService/"
Answer = Callable[[prefill_pb2.WriteKvResponse, grpc.aio.ServicerContext[Any, Any]], None]


class _References:
    """Nobody else uses the pool."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    async def acquire(self, reader_id: str, seq_id: str, first_block: int, num_blocks: int) -> tuple[int, ...]:
        """See References."""
        raise AssertionError("holds come with their references")

    def drop(self, reader_id: str) -> None:
        """See References."""
        self.dropped.append(reader_id)


def _stopped(_: prefill_pb2.WriteKvResponse, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    context.set_trailing_metadata((("tandem-stopped", "1"),))


@dataclass
class Prefill:
    """Prefill's end, serving."""

    settings: NixlSettings
    cache: HostKvCache = field(default_factory=lambda: HostKvCache(LAYOUT, NUM_BLOCKS))
    references: _References = field(default_factory=_References)
    answer: Answer = _stopped
    """Makes of a true answer what is sent."""
    port: int = 0
    num_writes: int = 0

    def __post_init__(self) -> None:
        self.cache.blocks.reshape(-1).view(np.uint64)[:] = np.random.default_rng(1).integers(1, 1 << 60, self.cache.blocks.nbytes // 8, np.uint64)
        for block in range(NUM_BLOCKS):
            self.cache.generations[block] = 1
        self.quarantine = Quarantine()
        self.holds = Holds(self.references, self.quarantine)
        self.pool = HostPool(self.cache)
        self.pairings: dict[str, Pairing] = {}
        self.executor = ThreadPoolExecutor(1)
        self.source = NixlSource(self.pool, self.holds, self.executor, self.settings)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Prefill]:
        """On 127.0.0.1."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Pair": grpc.stream_stream_rpc_method_handler(self._pair, prefill_pb2.PairRequest.FromString, prefill_pb2.PairResponse.SerializeToString),
            "WriteKv": grpc.unary_unary_rpc_method_handler(self._write, prefill_pb2.WriteKvRequest.FromString, prefill_pb2.WriteKvResponse.SerializeToString),
            "Hold": grpc.unary_stream_rpc_method_handler(self._hold, prefill_pb2.ReadKvRequest.FromString, kv_pb2.KvReady.SerializeToString),
        }
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tandem.v1.PrefillService", handlers),))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield self
        finally:
            await server.stop(None)
            self.source.close()
            self.executor.shutdown()
            self.cache.close()

    async def _pair(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        pairing = Pairing((await context.read()).start)
        self.pairings[pairing.pairing_id] = pairing
        offer = prefill_pb2.PairResponse(
            pairing_id=pairing.pairing_id,
            layout=kv_layout_to_proto(LAYOUT),
            nonce=pairing.nonce,
            num_blocks=NUM_BLOCKS,
            probe_bytes=len(self.pool.probe),
            probe_digest=self.pool.probe_digest,
        )
        try:
            try:
                offer.sources.append(await self.source.offer(pairing))
            except NoTransportError as error:
                offer.refusals["nixl"] = str(error)
            await context.write(offer)
            await context.read()
        finally:
            self.source.withdraw(pairing.pairing_id)
            del self.pairings[pairing.pairing_id]

    async def _hold(self, request: prefill_pb2.ReadKvRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """A hold on all blocks as long as the RPC lives."""
        hold = self.holds.open(f"of-{secrets.token_hex(4)}", request.pairing_id, 0, NUM_BLOCKS)
        try:
            hold.allocated(tuple(reversed(range(NUM_BLOCKS))))
            hold.announce(NUM_BLOCKS)
            ids, generations = hold.pool_ids, [self.cache.generations[block] for block in hold.pool_ids]
            await context.write(kv_pb2.KvReady(hold_id=hold.hold_id, num_blocks=NUM_BLOCKS, block_ids=ids, generations=generations))
            await asyncio.get_running_loop().create_future()
        finally:
            self.holds.close(hold)

    async def _write(self, request: prefill_pb2.WriteKvRequest, context: grpc.aio.ServicerContext[Any, Any]) -> prefill_pb2.WriteKvResponse:
        self.num_writes += 1
        try:
            pairing = self.pairings.get(request.pairing_id)
            if pairing is None:
                raise HoldUnknownError("no such pairing")
            response = await self.source.write(request, pairing)
        except HandoverError as error:
            code = grpc.StatusCode.INVALID_ARGUMENT if isinstance(error, HandoverProtocolError) else grpc.StatusCode.ABORTED
            reason = (("details-bin", b"NO_TRANSPORT"),) if isinstance(error, NoTransportError) else ()
            await context.abort(code, str(error), (("tandem-stopped", "1"), *reason))
        self.answer(response, context)
        return response


@dataclass
class Decode:
    """Decode's end of one pairing."""

    reader: NixlReader
    offer: prefill_pb2.PairResponse
    blocks: HostBlocks
    channel: grpc.aio.Channel

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[kv_pb2.KvReady]:
        """A hold on all of prefill's blocks."""
        open_hold: Any = self.channel.unary_stream(
            f"{_SERVICE}Hold", request_serializer=prefill_pb2.ReadKvRequest.SerializeToString, response_deserializer=kv_pb2.KvReady.FromString
        )
        call = open_hold(prefill_pb2.ReadKvRequest(pairing_id=self.offer.pairing_id))
        try:
            yield await call.read()
        finally:
            call.cancel()

    async def read(self) -> None:
        """One hand-over of all blocks."""
        async with self.hold() as ready:
            await self.reader.read(ready, Rows(self.blocks, range(NUM_BLOCKS)))


@asynccontextmanager
async def paired(port: int, settings: NixlSettings, *, attach: bool = True) -> AsyncIterator[Decode]:
    """Pairs and attaches."""
    channel, executor = control_channel(f"127.0.0.1:{port}"), ThreadPoolExecutor(1)
    blocks = HostBlocks(np.zeros((NUM_BLOCKS, LAYOUT.block_bytes), np.uint8))
    reader = NixlReader(blocks, executor, channel, settings)
    call: Any = None
    try:
        start = prefill_pb2.PairStart(process_id=PROCESS_ID, boot_id=boot_id(), transports=["nixl"], nonce=secrets.token_bytes(NONCE_BYTES))
        await reader.prepare()
        reader.greet(start)
        pair: Any = channel.stream_stream(
            f"{_SERVICE}Pair", request_serializer=prefill_pb2.PairRequest.SerializeToString, response_deserializer=prefill_pb2.PairResponse.FromString
        )
        call = pair()
        await call.write(prefill_pb2.PairRequest(start=start))
        offer = await call.read()
        if attach:
            if not offer.sources:
                raise NoTransportError(offer.refusals["nixl"])
            await reader.attach(offer, offer.sources[0])
        yield Decode(reader, offer, blocks, channel)
    finally:
        reader.close()
        if call is not None:
            call.cancel()
        await channel.close()
        executor.shutdown()


async def _prefill(settings: NixlSettings) -> None:
    async with Prefill(settings).serving() as prefill:
        print(prefill.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _decode(settings: NixlSettings, port: int) -> None:
    async with paired(port, settings) as decode:
        while True:
            await decode.read()
            print("read", flush=True)


def main() -> None:
    """prefill DIRECTION, or decode DIRECTION PORT; UCX_TLS comes by the environment."""
    role, direction = sys.argv[1:3]
    wanted: dict[str, Direction] = {"auto": "auto", "read": "read", "write": "write"}
    settings = NixlSettings("lo", direction=wanted[direction])
    asyncio.run(_prefill(settings) if role == "prefill" else _decode(settings, int(sys.argv[3])))


if __name__ == "__main__":
    main()
