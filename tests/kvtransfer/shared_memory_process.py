"""One end of `shared_memory` in a process of its own, talked to line by line: `python -m tests.kvtransfer.shared_memory_process prefill|decode <socket dir>`.

prefill: reads a PairStart, answers with its PairResponse, as hex; any number of them. decode: tells its PairStart, reads the PairResponse, says "attached",
then copies for longer than anybody waits and says "copying".
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from engine.kv_cache import HostKvCache, KvLayout
from engine.proto import kv_layout_to_proto
from kvtransfer.descriptor_sockets import DescriptorSockets
from kvtransfer.host_pool import HostPool
from kvtransfer.memories import HostBlocks
from kvtransfer.pairing import NONCE_BYTES, PROCESS_ID, Pairing, boot_id
from kvtransfer.shared_memory import SharedMemoryReader, SharedMemorySource
from kvtransfer.transport import Rows
from tandem.v1 import kv_pb2, prefill_pb2

LAYOUT = KvLayout("f" * 64, "bfloat16", 8, 2, 64, 16)
NUM_BLOCKS = 64
_RUNS = 20_000  # of all blocks: 80 GiB


def make_pool() -> HostPool:
    """A pool whose block i is full of i, and held."""
    cache = HostKvCache(LAYOUT, NUM_BLOCKS)
    cache.blocks[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
    cache.generations[:] = np.ones(NUM_BLOCKS, np.uint32).data
    return HostPool(cache)


def make_start() -> prefill_pb2.PairStart:
    """What decode says."""
    return prefill_pb2.PairStart(layout=kv_layout_to_proto(LAYOUT), process_id=PROCESS_ID, boot_id=boot_id(), nonce=secrets.token_bytes(NONCE_BYTES))


async def make_response(pool: HostPool, source: SharedMemorySource, pairing: Pairing) -> prefill_pb2.PairResponse:
    """What prefill answers."""
    return prefill_pb2.PairResponse(
        pairing_id=pairing.pairing_id,
        layout=kv_layout_to_proto(LAYOUT),
        nonce=pairing.nonce,
        num_blocks=NUM_BLOCKS,
        probe_bytes=len(pool.probe),
        probe_digest=pool.probe_digest,
        sources=[await source.offer(pairing)],
    )


def all_blocks(runs: int = 1) -> kv_pb2.KvReady:
    """An announcement of the whole pool, so many times."""
    ids = list(range(NUM_BLOCKS)) * runs
    return kv_pb2.KvReady(num_blocks=len(ids), block_ids=ids, generations=[1] * len(ids))


@asynccontextmanager
async def open_source(pool: HostPool, directory: Path) -> AsyncIterator[SharedMemorySource]:
    """Prefill's side."""
    sockets = DescriptorSockets(directory)
    sockets.start()
    try:
        yield SharedMemorySource(pool, sockets)
    finally:
        await sockets.close()


async def _prefill(directory: Path) -> None:
    pool = make_pool()
    async with open_source(pool, directory) as source:
        while line := await asyncio.to_thread(sys.stdin.readline):
            pairing = Pairing(prefill_pb2.PairStart.FromString(bytes.fromhex(line)))
            print((await make_response(pool, source, pairing)).SerializeToString().hex(), flush=True)


async def _decode(directory: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        start, blocks = make_start(), np.full((NUM_BLOCKS, LAYOUT.block_bytes), 255, np.uint8)
        print(start.SerializeToString().hex(), flush=True)
        response = prefill_pb2.PairResponse.FromString(bytes.fromhex(await asyncio.to_thread(sys.stdin.readline)))
        reader = SharedMemoryReader(executor, directory)
        reader.greet(start)
        await reader.attach(response, response.sources[0])
        print("attached", flush=True)
        copy = asyncio.create_task(reader.read(all_blocks(_RUNS), Rows(HostBlocks(blocks), list(range(NUM_BLOCKS)) * _RUNS)))
        while (blocks[-1] == 255).any():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        print("copying", flush=True)
        await copy


if __name__ == "__main__":
    asyncio.run({"prefill": _prefill, "decode": _decode}[sys.argv[1]](Path(sys.argv[2])))
