"""The KV pool of a CPU device: one allocation that a transport can read, block by block."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; not in fcntl before Python 3.13
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
"""What a pool's memfd is sealed with."""
PROBE_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23
_POPULATED_AT_ONCE_BYTES = 16 << 20
_ALIGNMENT = 64
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of a pool. Byte order within a block: [head shard][layer][K, V][token][kv head of the shard][element]."""

    model_fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    version: int = 1
    num_head_shards: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim * _BYTES_PER_ELEMENT[self.dtype]

    def differences(self, other: KvLayout) -> dict[str, tuple[object, object]]:
        """Fields in which two layouts differ, as (own value, other's value)."""
        return {name: (getattr(self, name), getattr(other, name)) for name in self.__slots__ if getattr(self, name) != getattr(other, name)}


class HostKvCache:
    """A pool of `num_blocks` blocks in one pre-faulted memfd, block-major: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].

    Behind the blocks are `probe_bytes` random ones, by which a transport is tried, and a table of generations: of each block a number that is odd while the
    block is held and grows by one whenever a hold of it begins or ends. Blocks are touched by the engine thread and by readers that hold a reference to them
    (design rule 1); generations are written by the engine thread. The memory can be mapped elsewhere for reading only, and never be cut.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, *, probe_bytes: int = PROBE_BYTES) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.probe_offset = _aligned(num_blocks * layout.block_bytes)
        self.generations_offset = _aligned(self.probe_offset + probe_bytes)
        self.num_bytes = self.generations_offset + 4 * num_blocks
        self.fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.num_bytes)
            self.memory = mmap.mmap(self.fd, self.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)  # taken where the system's shmem_enabled is "advise" or more
            populate(self.memory)
            # Behind the writable mapping, which stays writable: a later one cannot be, and nobody can cut the file under a reader.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            self.close()
            raise
        self.blocks: npt.NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8, num_blocks * layout.block_bytes).reshape(num_blocks, layout.block_bytes)
        """Writable bytes of each block, [num_blocks, block_bytes]."""
        self.probe: npt.NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8, probe_bytes, self.probe_offset)
        self.probe[:] = np.frombuffer(os.urandom(probe_bytes), np.uint8)
        self.generations: memoryview = memoryview(self.memory)[self.generations_offset : self.num_bytes].cast("I")
        """The generation of each block, [num_blocks]."""

    def close(self) -> None:
        """Gives the descriptor back; the mapping goes when its last view does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def populate(memory: mmap.mmap) -> None:
    """Gives every page of a writable mapping its memory now: 0.5 s per GiB, without the GIL, which mmap's own madvise keeps. Raises OSError."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    for start in range(0, len(memory), _POPULATED_AT_ONCE_BYTES):  # in between other threads of the process may map memory
        if _libc.madvise(address + start, min(_POPULATED_AT_ONCE_BYTES, len(memory) - start), _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            raise OSError(number, f"{len(memory)} bytes cannot be had: {os.strerror(number)}")


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
