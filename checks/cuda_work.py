"""What gpu-check's processes do: prefill makes a pool and exports it, decode opens it, copies, and is measured."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from checks.cuda_peer import Work
from engine.kv_cache import KvLayout
from kvtransfer.cuda_mapping import Mapping, Mappings, PoolExport, wait_until_done
from kvtransfer.cuda_pool import CudaBlocks, CudaPool, GenerationTable
from kvtransfer.cuda_runtime import CudaRuntime, CupyRuntime, Gather, ids_of

LAYOUTS = {
    8 << 10: KvLayout("gpu-check", "bfloat16", num_layers=1, num_kv_heads=1, head_dim=128, block_size=16),
    64 << 10: KvLayout("gpu-check", "bfloat16", num_layers=1, num_kv_heads=8, head_dim=128, block_size=16),
    2 << 20: KvLayout("gpu-check", "bfloat16", num_layers=32, num_kv_heads=8, head_dim=128, block_size=16),
}
"""By the bytes of a block: a layer of one head, a layer of eight, and 32 of those."""
_FILL_BYTES = 64 << 20
_OLD_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class CudaWork(Work):
    """Work of one process, as prefill or as decode."""

    def __init__(self, runtime: CudaRuntime) -> None:
        super().__init__(runtime)
        self.mappings = Mappings(runtime, ThreadPoolExecutor(1))
        self._pool: CudaPool | None = None
        self._mapping: Mapping | None = None
        self._landing: CudaBlocks | None = None

    # prefill

    def make_pool(self, block_bytes: int, num_bytes: int, seed: int) -> bytes:
        """A pool full of random bytes, all its blocks held; its export, and with it the table of generations."""
        if self._pool is not None:
            self._pool.close()
        num_blocks = num_bytes // block_bytes
        self._pool = CudaPool(self.runtime, LAYOUTS[block_bytes], num_blocks, generations=_table(num_blocks))
        self._pool.generations.numbers[:] = memoryview(bytes([1, 0, 0, 0]) * num_blocks).cast("I")
        generator = np.random.default_rng(seed)
        for start in range(0, num_blocks * block_bytes, _FILL_BYTES):
            self.runtime.copy_from_host(self._pool.address + start, generator.bytes(min(_FILL_BYTES, num_blocks * block_bytes - start)))
        self.sent_fds = [self._pool.generations.fd]
        return PoolExport.of(self._pool).pack()

    def pool_digests(self, ids: Sequence[int]) -> list[int]:
        """Of blocks of the pool."""
        return list(self._known(self._pool).memory.digests(ids))

    def pool_block(self, block: int) -> bytes:
        """Bytes of one block of the pool."""
        memory = self._known(self._pool).memory
        return self.runtime.copy_to_host(memory.address + block * memory.block_bytes, memory.block_bytes)

    def set_generation(self, block: int, generation: int) -> None:
        """As if another hold of the block had begun, or not."""
        self._known(self._pool).generations.numbers[block] = generation

    # decode

    def open_pool(self, payload: bytes, num_landing_blocks: int) -> float:
        """Opens the pool whose export and table came, and makes room for that many blocks; the seconds that the opening took."""
        export = PoolExport.unpack(payload)
        started = time.perf_counter()
        self._mapping = self.mappings.open(export, self.received_fds[0])
        elapsed_s = time.perf_counter() - started
        for fd in self.received_fds:
            os.close(fd)
        address = self.runtime.malloc(num_landing_blocks * export.block_bytes)
        self._landing = CudaBlocks(self.runtime, address, num_landing_blocks, export.block_bytes)
        return elapsed_s

    def close_pool(self) -> None:
        """Closes it, and gives the room back."""
        self.mappings.give_back(self._known(self._mapping))
        self.runtime.free(self._known(self._landing).address)
        self._mapping = self._landing = None

    def read(self, ids: Sequence[int], to_ids: Sequence[int]) -> float:
        """Copies as the transport does; the seconds it took. Raises HandoverError."""
        started = time.perf_counter()
        self._known(self._mapping).gather(ids, [1] * len(ids), self._known(self._landing), to_ids, threading.Event())
        return time.perf_counter() - started

    def landing_digests(self, ids: Sequence[int]) -> list[int]:
        """Of blocks that arrived."""
        return list(self._known(self._landing).digests(ids))

    def latencies(self, num_blocks: int, rounds: int) -> list[float]:
        """Seconds of each of so many small reads."""
        generator = np.random.default_rng(0)
        mapping, landing = self._known(self._mapping), self._known(self._landing)
        return [
            self.read(generator.permutation(mapping.blocks.num_blocks)[:num_blocks].tolist(), list(range(min(num_blocks, landing.num_blocks))))
            for _ in range(rounds)
        ]

    def gather_speed(self, num_blocks: int, rounds: int, max_ctas: int) -> dict[str, float]:
        """Bytes per second of gathers that follow each other without a pause, and the seconds of CPU that submitting one takes."""
        stream, gather = self.runtime.new_stream(), self._random_gather(num_blocks)
        self.set_max_ctas(max_ctas)
        self._submit(stream, [gather] * 3)
        started = time.perf_counter()
        submitted_s = self._submit(stream, [gather] * rounds)
        elapsed_s = time.perf_counter() - started
        self.runtime.close_stream(stream)
        return {"bytes_per_s": rounds * num_blocks * gather.block_bytes / elapsed_s, "submit_s": submitted_s / rounds}

    def _random_gather(self, num_blocks: int) -> Gather:
        generator, mapping, landing = np.random.default_rng(1), self._known(self._mapping), self._known(self._landing)
        ids, to_ids = (generator.permutation(memory.num_blocks)[:num_blocks].tolist() for memory in (mapping.blocks, landing))
        return Gather(mapping.blocks.address, ids_of(ids), landing.address, ids_of(to_ids), landing.block_bytes)

    def _submit(self, stream: int, gathers: Sequence[Gather]) -> float:
        """Puts all of them on the stream and waits for them; the seconds that putting them there took."""
        started = time.perf_counter()
        events = [self.runtime.gather(stream, gather) for gather in gathers]
        submitted_s = time.perf_counter() - started
        self._finish(events)
        return submitted_s

    def _finish(self, events: Sequence[int]) -> None:
        while not self.runtime.is_done(events[-1]):
            pass  # a pause would be a part of what is measured
        for event in events:
            wait_until_done(self.runtime, event)
            self.runtime.close_event(event)

    def slow_down(self, num_blocks: int, max_ctas: int, rounds: int) -> dict[str, float]:
        """Seconds of a loop of matrix products alone and beside gathers that last longer than it, and the gathers' own speed meanwhile."""
        stream, gather = self.runtime.new_stream(), self._random_gather(num_blocks)
        self.set_max_ctas(max_ctas)
        products = self.products()
        products()
        alone_s = statistics.median(products() for _ in range(rounds))
        self._submit(stream, [gather] * 2)
        started = time.perf_counter()
        self._submit(stream, [gather] * 4)
        gather_s = (time.perf_counter() - started) / 4
        beside: list[float] = []
        for _ in range(rounds):
            events = [self.runtime.gather(stream, gather) for _ in range(int(1.5 * alone_s / gather_s) + 2)]
            beside.append(products())
            self._finish(events)
        self.runtime.close_stream(stream)
        beside_s = statistics.median(beside)
        return {"alone_s": alone_s, "beside_s": beside_s, "slow_down": beside_s / alone_s - 1, "bytes_per_s": num_blocks * gather.block_bytes / gather_s}

    # of the GPU itself: what a dry run without one replaces

    def set_max_ctas(self, max_ctas: int) -> None:
        """Of the gathers that follow."""
        assert isinstance(self.runtime, CupyRuntime)
        self.runtime.max_ctas = max_ctas

    def free_bytes(self) -> int:
        """Free memory of the GPU."""
        return int(_cupy().cuda.runtime.memGetInfo()[0])

    def environment(self) -> dict[str, str]:
        """Versions, and the GPU's name."""
        import torch

        cupy = _cupy()
        return {
            "gpu": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "cupy": cupy.__version__,
            "driver": str(cupy.cuda.runtime.driverGetVersion()),
            "kernel": os.uname().release,
        }

    def memcpy_speed(self, num_bytes: int, rounds: int) -> float:
        """Payload bytes per second of plain copies within the GPU."""
        cuda = _cupy().cuda.runtime
        source, destination, stream = self.runtime.malloc(num_bytes), self.runtime.malloc(num_bytes), self.runtime.new_stream()

        def copy(times: int) -> None:
            for _ in range(times):
                cuda.memcpyAsync(destination, source, num_bytes, 3, stream)
            cuda.streamSynchronize(stream)

        copy(3)
        started = time.perf_counter()
        copy(rounds)
        elapsed_s = time.perf_counter() - started
        self.runtime.free(source)
        self.runtime.free(destination)
        self.runtime.close_stream(stream)
        return rounds * num_bytes / elapsed_s

    def products(self) -> Callable[[], float]:
        """A loop of matrix products as decode's forward has them; it returns its seconds on the GPU."""
        import torch

        left, right = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def loop() -> float:
            first.record()
            for _ in range(20):
                torch.mm(left, right)
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3

        return loop

    def _known(self, what: Any) -> Any:
        assert what is not None, "it was not made"
        return what


def _cupy() -> Any:
    return importlib.import_module("cupy")


def _table(num_blocks: int) -> GenerationTable:
    try:
        return GenerationTable(num_blocks)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        print("  this kernel does not know F_SEAL_FUTURE_WRITE: generations are measured without it", flush=True)
        return GenerationTable(num_blocks, seals=_OLD_SEALS)


def on_gpu() -> CudaWork:
    """Work on the first visible GPU."""
    import torch

    torch.zeros(1, device="cuda")
    return CudaWork(CupyRuntime())
