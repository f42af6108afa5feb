"""The KV pool of a CPU device: one allocation that a transport can read, block by block."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MADV_POPULATE_WRITE = 23
_BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of a pool; two pools pair only when these are equal. Byte order within a block: [layer][K, V][token][kv head][element]."""

    model_fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    version: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim * _BYTES_PER_ELEMENT[self.dtype]

    def differences(self, other: KvLayout) -> dict[str, tuple[object, object]]:
        """Fields in which two layouts differ, as (own value, other's value)."""
        return {name: (getattr(self, name), getattr(other, name)) for name in self.__slots__ if getattr(self, name) != getattr(other, name)}


class HostKvCache:
    """A pool of `num_blocks` blocks in one pre-faulted memfd, block-major: [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim].

    Memory is touched by the engine thread and by readers that hold a reference to the block (design rule 1).
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.fd = os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, num_blocks * layout.block_bytes)
        self.memory = mmap.mmap(self.fd, num_blocks * layout.block_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.memory.madvise(_MADV_POPULATE_WRITE)
        self.blocks: npt.NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8).reshape(num_blocks, layout.block_bytes)
        """Writable bytes of each block, [num_blocks, block_bytes]."""

    def close(self) -> None:
        """Gives the descriptor back; the mapping goes when its last view does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
