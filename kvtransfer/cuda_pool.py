"""A KV pool on a GPU: one allocation that can be exported as a whole, and its generations in host memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

from engine.kv_cache import PROBE_BYTES, SEALS, KvLayout
from kvtransfer import xxh3
from kvtransfer.cuda_kernels import VECTOR_BYTES
from kvtransfer.cuda_runtime import CudaRuntime, ids_of

_ALIGNMENT = 256
_DIGEST_BLOCKS = 1 << 12
"""Blocks whose accumulators are made in one launch."""


class CudaBlocks:
    """Blocks in a GPU's memory, one behind the other."""

    def __init__(self, runtime: CudaRuntime, address: int, num_blocks: int, block_bytes: int) -> None:
        if block_bytes % VECTOR_BYTES or address % VECTOR_BYTES:
            raise ValueError(f"blocks on a GPU must start at multiples of {VECTOR_BYTES} bytes and have that size, got {block_bytes}")
        self.runtime = runtime
        self.address = address
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes

    @property
    def array(self) -> Any:
        """See ConvertibleMemory."""
        return self.runtime.array(self.address, self.num_blocks, self.block_bytes)

    def room(self, num_blocks: int, block_bytes: int) -> CudaBlocks:
        """See ConvertibleMemory. Its memory goes with the last reference to it. Raises CudaError."""
        room = CudaBlocks(self.runtime, self.runtime.malloc(num_blocks * block_bytes), num_blocks, block_bytes)
        weakref.finalize(room, self.runtime.free, room.address).atexit = False  # the process's end gives it back too
        return room

    def settle(self) -> None:
        """See ConvertibleMemory."""
        self.runtime.settle()

    def digests(self, ids: Sequence[int]) -> list[int]:
        """xxh3 of each block, made on the device; waits for it, not for the engine's work."""
        if self.block_bytes < xxh3.MIN_BYTES:
            return self._digests_on_host(ids)
        digests: list[int] = []
        for start in range(0, len(ids), _DIGEST_BLOCKS):
            rows = self.runtime.xxh3_accumulators(self.address, ids_of(ids[start : start + _DIGEST_BLOCKS]), self.block_bytes)
            digests.extend(xxh3.finish(row, self.block_bytes) for row in rows.tolist())
        return digests

    def _digests_on_host(self, ids: Sequence[int]) -> list[int]:
        import xxhash  # the device's checks run where it may be missing

        return [xxhash.xxh3_64_intdigest(self.runtime.copy_to_host(self.address + block * self.block_bytes, self.block_bytes)) for block in ids]


class GenerationTable:
    """Of each block of a pool a number, in a memfd that other processes map for reading only (see engine.block_pool)."""

    def __init__(self, num_blocks: int, *, seals: int = SEALS) -> None:
        """`seals` are for kernels that lack some. Raises OSError."""
        self.fd = os.memfd_create("tandem-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.offset = 0
        """Where the table starts in the file."""
        try:
            os.ftruncate(self.fd, 4 * num_blocks)
            self.numbers: memoryview = memoryview(mmap.mmap(self.fd, 4 * num_blocks, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)).cast("I")
            """The generation of each block, [num_blocks]; written by the engine thread."""
            # Behind the writable mapping, which stays: a later one cannot be, and nobody can cut the file under a reader.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Gives the descriptor back; the table stays as long as somebody maps it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class CudaPool:
    """Blocks and behind them the probe's bytes, in one cudaMalloc that holds nothing else: its handle opens all of it.

    Who announces blocks does so when the event behind the work that wrote them is done, so that no event or semaphore has to cross to the reader.
    """

    def __init__(
        self, runtime: CudaRuntime, layout: KvLayout, num_blocks: int, *, probe: bytes | None = None, generations: GenerationTable | None = None
    ) -> None:
        """`probe` is random unless given; `generations` are the pool's own unless given, and the pool's to close in any case. Raises CudaError, OSError."""
        self.runtime = runtime
        self.layout = layout
        self.pool_id = secrets.token_hex(16)
        """This pool, and no other one that may get the same address or the same process later."""
        self.probe = probe if probe is not None else os.urandom(PROBE_BYTES)
        self.probe_offset = -(-num_blocks * layout.block_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = self.probe_offset + len(self.probe)
        if len(self.probe) % VECTOR_BYTES:
            raise ValueError(f"the probe must have a multiple of {VECTOR_BYTES} bytes, got {len(self.probe)}")
        self.generations = generations or GenerationTable(num_blocks)
        self.address = runtime.malloc(self.num_bytes)
        self.memory = CudaBlocks(runtime, self.address, num_blocks, layout.block_bytes)
        self._exported = False
        runtime.copy_from_host(self.address + self.probe_offset, self.probe)

    def export(self) -> bytes:
        """The handle of the allocation, for decode's eyes only. From now on the memory stays until the process ends. Raises CudaError."""
        self._exported = True
        return self.runtime.ipc_get_handle(self.address)

    def close(self) -> None:
        """Gives back what can be. CUDA leaves undefined what a free under an importer does, and nobody knows when the last one has gone. Idempotent."""
        self.generations.close()
        if self.address and not self._exported:
            self.runtime.free(self.address)
        self.address = 0
