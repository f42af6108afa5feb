"""Copying between pools whose blocks hold other numbers of tokens, or other numbers of head shards: the same elements in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import lcm

import numpy as np
import numpy.typing as npt

from engine.kv_cache import KvLayout
from kvtransfer.memories import BlockMemory, HostBlocks, host_array
from tandem.v1 import kv_pb2

_Block = npt.NDArray[np.uint8]


def unlike(own: KvLayout, other: KvLayout) -> dict[str, tuple[object, object]]:
    """What keeps two pools from pairing, as (own value, other's value) by field; empty when copying can convert between them."""
    aligned = replace(other, block_size=own.block_size, num_head_shards=own.num_head_shards)
    differences = own.differences(aligned)
    for layout, mine in ((own, True), (other, False)):
        if layout.block_size < 1 or layout.num_head_shards < 1 or layout.num_kv_heads % layout.num_head_shards:
            value = f"{layout.num_kv_heads} heads in {layout.num_head_shards} shards, {layout.block_size} tokens"
            differences["num_head_shards"] = (value, "") if mine else ("", value)
    return differences


class Conversion:
    """From blocks of one layout into blocks of another one."""

    def __init__(self, source: KvLayout, own: KvLayout) -> None:
        """`unlike` finds nothing between the two."""
        self._source, self._own = source, own
        self._num_parts = lcm(source.num_head_shards, own.num_head_shards)
        self._free: list[HostBlocks] = []

    @classmethod
    def between(cls, source: KvLayout, own: KvLayout) -> Conversion | None:
        """None when blocks can be copied as they are."""
        return None if source == own else cls(source, own)

    @contextmanager
    def staging(self, num_blocks: int) -> Iterator[HostBlocks]:
        """Room for this many of the source's blocks: kept for the next one, since touching new memory is ten times as slow as the copy."""
        fitting = next((memory for memory in self._free if memory.num_blocks >= num_blocks), None)
        if fitting is not None:
            self._free.remove(fitting)
        else:
            self._free.clear()  # too small, each of them
            fitting = HostBlocks(np.zeros((num_blocks, self._source.block_bytes), np.uint8))
        try:
            yield fitting
        finally:
            self._free.append(fitting)

    def scatter(self, staged: BlockMemory, run: kv_pb2.KvReady, pool: BlockMemory, block_table: Sequence[int], first_token: int, end_token: int) -> None:
        """Copies the tokens of a staged run that are within [first_token, end_token) into the sequence's blocks."""
        rows, blocks = host_array(staged), host_array(pool)
        from_size, to_size = self._source.block_size, self._own.block_size
        for index in range(run.num_blocks):
            block_start = (run.first_block + index) * from_size
            token, end = max(block_start, first_token), min(block_start + from_size, end_token)
            while token < end:
                until = min(end, (token // to_size + 1) * to_size)
                self._copy(rows[index], token - block_start, blocks[block_table[token // to_size]], token % to_size, until - token)
                token = until

    def _copy(self, source: _Block, source_slot: int, destination: _Block, slot: int, num_tokens: int) -> None:
        """Copies tokens of one block into one block, heads in the finest parts that both sides have as runs."""
        for part in range(self._num_parts):
            piece = _part(source, self._source, part, self._num_parts)[:, :, source_slot : source_slot + num_tokens]
            np.copyto(_part(destination, self._own, part, self._num_parts)[:, :, slot : slot + num_tokens], piece)


def _part(block: _Block, layout: KvLayout, part: int, num_parts: int) -> _Block:
    """The bytes [layer, K or V, token, head bytes] of one of `num_parts` equal parts of a block's heads."""
    per_shard = num_parts // layout.num_head_shards
    head_bytes = layout.block_bytes // (layout.num_layers * 2 * layout.block_size * num_parts)
    shape = (layout.num_head_shards, layout.num_layers, 2, layout.block_size, per_shard, head_bytes)
    return block.reshape(shape)[part // per_shard, :, :, :, part % per_shard]
