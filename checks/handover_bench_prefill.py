"""`python -m checks.handover_bench_prefill`: a prefill instance that computes nothing. Its pool is full already, and every prompt is announced at once.

Pairing, sources, ReadKv and WriteKv are the worker's own. It prints one line when it serves, and with `--no-confirm` one for each prompt that decode
has copied; it ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import uvloop

from checks.handover_bench_machine import pin
from checks.handover_bench_pool import SyntheticPool, layout_of, nixl_of
from engine.async_engine import AsyncEngine
from kvtransfer.hold import CONFIRMED, Hold, Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.nixl_settings import NixlSettings
from kvtransfer.quarantine import Quarantine
from kvtransfer.sources import SourceParts, open_sources
from kvtransfer.transport import NAMES
from prefill_svc.pairings import OpenPairing, Pairings, PoolFacts
from prefill_svc.pool import PrefillPool
from prefill_svc.servicer import PrefillServicer
from rpc.process import keep_freed_memory
from rpc.server import RpcServer
from tandem.v1 import kv_pb2, prefill_pb2
from telemetry.metrics import WorkerMetrics
from worker.load import LoadWatch

_DRAIN_S = 1.0


class SyntheticPrefill(PrefillServicer):
    """The servicer of a pool without an engine: a prompt's tokens only say how many blocks it has."""

    def __init__(self, pool: PrefillPool, blocks: SyntheticPool, *, confirm: bool) -> None:
        super().__init__(pool, cast(LoadWatch, None))  # there is no engine whose load could be watched
        self._served = pool
        self._blocks = blocks
        self._confirms = confirm

    async def Prefill(self, request_iterator: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """See prefill.proto; without `confirm` the hold lasts until decode goes away."""
        start = (await context.read()).start
        pairing = self._served.pairings.find(start.pairing_id)
        first, end = (-(-tokens // self._blocks.kv_cache.layout.block_size) for tokens in (start.num_cached_tokens, len(start.prompt_token_ids)))
        reader_id = secrets.token_hex(8)
        with pairing.working():
            ids = self._blocks.allocate(f"reader:{reader_id}", end)
            hold = self._served.holds.open(reader_id, start.pairing_id, first, end - first)
            try:
                hold.allocated(ids)
                await self._talk(start, pairing, hold, context)
            finally:
                self._served.holds.close(hold)

    async def _talk(self, start: prefill_pb2.PrefillStart, pairing: OpenPairing, hold: Hold, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.write(prefill_pb2.PrefillResponse(kv_ready=await self._announce(start, pairing, hold)))
        announced_ns = time.monotonic_ns()
        done = prefill_pb2.PrefillDone(first_tokens=[prefill_pb2.FirstToken(token_id=5)], num_blocks=hold.num_announced_blocks, hold_id=hold.hold_id)
        await context.write(prefill_pb2.PrefillResponse(done=done))
        if await context.read() is grpc.aio.EOF:
            return
        if self._confirms:
            context.set_trailing_metadata(((CONFIRMED, hold.hold_id),))
            return
        _say(request_id=start.request_id, announced_ns=announced_ns, copied_ns=time.monotonic_ns())
        await context.read()

    async def _announce(self, start: prefill_pb2.PrefillStart, pairing: OpenPairing, hold: Hold) -> kv_pb2.KvReady:
        first, count = hold.announce(hold.first_block + hold.num_blocks)
        ready = kv_pb2.KvReady(hold_id=hold.hold_id, first_block=first, num_blocks=count)
        ids = hold.pool_ids[first : first + count]
        ready.block_ids.extend(ids)  # by any transport: decode looks up what each block must hold
        if pairing.offered[start.transport].one_sided:
            ready.generations.extend(self._blocks.kv_cache.generations[block] for block in ids)
        if start.checksum:
            ready.digests.extend(await asyncio.get_running_loop().run_in_executor(self._served.executor, self._served.memory.digests, ids))
        return ready


async def serve(blocks: SyntheticPool, *, confirm: bool, socket_dir: Path | None, nixl: NixlSettings) -> None:
    """Serves until standard input ends."""
    holds = Holds(blocks, Quarantine())
    host = HostPool(blocks.kv_cache)
    with ThreadPoolExecutor(1) as executor:
        async with open_sources(SourceParts(host, holds, socket_dir, nixl=nixl), NAMES) as sources:
            pairings = Pairings(PoolFacts.of(host), sources)
            engine = cast(AsyncEngine, None)  # what needs one is not served
            pool = PrefillPool(engine, host.memory, holds, sources, pairings, executor, WorkerMetrics("synthetic", "prefill"))
            server = RpcServer("prefill")
            SyntheticPrefill(pool, blocks, confirm=confirm).add_to(server)
            port = await server.start()
            server.set_ready(True)
            _say(port=port, missing=dict(sources.missing))
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
            await server.drain(_DRAIN_S)


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", type=layout_of, required=True, help="the pool's layout, as JSON")
    parser.add_argument("--num-blocks", type=int, required=True, help="blocks of the pool")
    parser.add_argument("--cores", type=int, nargs="+", required=True, help="the cores to run on")
    parser.add_argument("--socket-dir", type=Path, help="where unix sockets are made")
    parser.add_argument("--nixl", type=nixl_of, default=NixlSettings(), help="NIXL's settings, as JSON")
    parser.add_argument("--no-confirm", action="store_true", help="hold until decode goes away")
    arguments = parser.parse_args(argv)
    pin(arguments.cores)
    keep_freed_memory()
    sys.setswitchinterval(0.0005)  # as a worker does
    blocks = SyntheticPool(arguments.layout, arguments.num_blocks).fill()
    uvloop.run(serve(blocks, confirm=not arguments.no_confirm, socket_dir=arguments.socket_dir, nixl=arguments.nixl))


if __name__ == "__main__":
    main()
