"""`cuda_ipc` in the contract suite: two fake processes on one fake GPU, whose memory is that of the engines' own pools."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from engine.kv_cache import HostKvCache
from kvtransfer.cuda_ipc import CudaIpcReader, CudaIpcSource
from kvtransfer.cuda_mapping import Mappings
from kvtransfer.cuda_pool import CudaPool, GenerationTable
from kvtransfer.descriptor_sockets import DescriptorSockets
from tests.kvtransfer.kinds import Opened, TwoPools, kind
from tests.support.fake_cuda import FakeDriver, FakeRuntime


class _EnginesTable(GenerationTable):
    """The generations that an engine keeps in its own pool's file."""

    def __init__(self, kv_cache: HostKvCache) -> None:
        self.fd = kv_cache.fd
        self.offset = kv_cache.generations_offset
        self.numbers = kv_cache.generations

    def close(self) -> None:
        """The engine's."""


def _pool_over(runtime: FakeRuntime, kv_cache: HostKvCache) -> CudaPool:
    runtime.back_next_malloc(np.frombuffer(kv_cache.memory, np.uint8))
    pool = CudaPool(runtime, kv_cache.layout, kv_cache.num_blocks, probe=kv_cache.probe.tobytes(), generations=_EnginesTable(kv_cache))
    assert pool.probe_offset == kv_cache.probe_offset, "the engine's probe and the pool's are the same bytes"
    return pool


@kind("cuda_ipc", one_sided=True)
@asynccontextmanager
async def open_cuda_ipc(two: TwoPools) -> AsyncIterator[Opened]:
    """Sockets are real."""
    driver = FakeDriver()
    prefill, decode = FakeRuntime(driver), FakeRuntime(driver)
    decode.in_kernel = two.gate.middle
    pool, own = _pool_over(prefill, two.prefill.kv_cache), _pool_over(decode, two.decode.kv_cache)
    mappings = Mappings(decode, two.executor)
    with tempfile.TemporaryDirectory() as directory:
        sockets = DescriptorSockets(Path(directory))
        sockets.start()

        async def dies() -> None:
            await sockets.close()
            prefill.kill()

        try:
            yield Opened(CudaIpcSource(pool, sockets), lambda: CudaIpcReader(own.memory, mappings, two.executor, Path(directory)), dies, own.memory)
        finally:
            await sockets.close()
            two.gate.open()
            two.executor.shutdown()
            assert (len(mappings), decode.num_open, decode.num_launched, decode.num_streams) == (0, 0, 0, 0)
