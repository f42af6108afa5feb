"""Memories of blocks that a transport reads from or copies into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

Blocks = npt.NDArray[np.uint8]
"""Bytes of a pool in host memory, [num_blocks, block_bytes]."""


class BlockMemory(Protocol):
    """Blocks of one size, one behind the other."""

    num_blocks: int
    block_bytes: int

    def digests(self, ids: Sequence[int]) -> list[int]:
        """A 64-bit digest of each of these blocks, in their order; takes time in proportion to their bytes."""
        ...


@runtime_checkable
class ConvertibleMemory(BlockMemory, Protocol):
    """Blocks whose bytes can be put into another order while they are copied within the memory."""

    array: Any
    """[num_blocks, block_bytes] of uint8; slices, reshapes and assigns as numpy's do."""

    def room(self, num_blocks: int, block_bytes: int) -> ConvertibleMemory:
        """New memory of the same kind, for blocks of another size."""
        ...

    def settle(self) -> None:
        """Returns when all assignments to `array` are done."""
        ...


class HostBlocks:
    """Blocks in this process's own memory."""

    def __init__(self, array: Blocks) -> None:
        """`array` is [num_blocks, block_bytes], each block contiguous."""
        self.array = array
        self.num_blocks, self.block_bytes = array.shape

    def digests(self, ids: Sequence[int]) -> list[int]:
        """xxh3 of each block; large ones are read without the GIL."""
        return [xxhash.xxh3_64_intdigest(self.array[block]) for block in ids]

    def room(self, num_blocks: int, block_bytes: int) -> HostBlocks:
        """See ConvertibleMemory."""
        return HostBlocks(np.zeros((num_blocks, block_bytes), np.uint8))

    def settle(self) -> None:
        """See ConvertibleMemory: an assignment is done when it returns."""


def host_array(memory: BlockMemory) -> Blocks:
    """The bytes of a memory that must be a host's. Raises TypeError: a reader was attached to a pool that it cannot write to."""
    if not isinstance(memory, HostBlocks):
        raise TypeError(f"a reader of host memory was given {type(memory).__name__}")
    return memory.array
