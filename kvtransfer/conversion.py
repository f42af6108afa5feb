"""Copying between pools whose blocks hold other numbers of tokens, or other numbers of head shards: the same elements in another order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import lcm
from typing import Any

from engine.kv_cache import KvLayout
from kvtransfer.errors import NoTransportError
from kvtransfer.memories import BlockMemory, ConvertibleMemory
from tandem.v1 import kv_pb2


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
    """From blocks of one layout into blocks of another one: runs are read into staged blocks of the source's, and scattered from there."""

    def __init__(self, source: KvLayout, own: KvLayout, pool: ConvertibleMemory, max_kept_bytes: int) -> None:
        """`unlike` finds nothing between the two; `pool` has the blocks of `own`."""
        self._source, self._own, self._pool = source, own, pool
        self._num_parts = lcm(source.num_head_shards, own.num_head_shards)
        self._max_kept_bytes = max_kept_bytes
        self._free: list[ConvertibleMemory] = []

    @classmethod
    def between(cls, source: KvLayout, own: KvLayout, pool: BlockMemory, *, max_kept_bytes: int) -> Conversion | None:
        """None when blocks can be copied as they are. Raises NoTransportError for a pool whose kind of memory cannot be converted into."""
        if source == own:
            return None
        if not isinstance(pool, ConvertibleMemory):
            differences = ", ".join(f"{name} {theirs} for {mine}" for name, (mine, theirs) in own.differences(source).items())
            raise NoTransportError(f"{type(pool).__name__} cannot be converted into: {differences}")
        return cls(source, own, pool, max_kept_bytes)

    @contextmanager
    def staging(self, num_blocks: int) -> Iterator[ConvertibleMemory]:
        """Room for this many of the source's blocks. It is kept for the next one, since touching new memory is ten times as slow as the copy."""
        # The least that fits: what is in use at once is bounded by the budgets, and what is kept must not grow beyond that.
        memory = min((one for one in self._free if one.num_blocks >= num_blocks), key=lambda one: one.num_blocks, default=None)
        if memory is not None:
            self._free.remove(memory)
        else:
            memory = self._pool.room(num_blocks, self._source.block_bytes)
        try:
            yield memory
        finally:
            self._keep(memory)

    def _keep(self, memory: ConvertibleMemory) -> None:
        """Keeps the largest ones that the bound has room for, one at least."""
        self._free.append(memory)
        self._free.sort(key=lambda one: -one.num_blocks)
        while len(self._free) > 1 and sum(one.num_blocks for one in self._free) * self._source.block_bytes > self._max_kept_bytes:
            self._free.pop()

    def scatter(
        self, staged: ConvertibleMemory, run: kv_pb2.KvReady, block_table: Sequence[int], first_token: int, end_token: int, stop: threading.Event
    ) -> None:
        """Copies the tokens of a staged run that are within [first_token, end_token) into the sequence's blocks; ends early once `stop` is set."""
        rows, blocks = staged.array, self._pool.array
        from_size, to_size = self._source.block_size, self._own.block_size
        for index in range(run.num_blocks):
            block_start = (run.first_block + index) * from_size
            token, end = max(block_start, first_token), min(block_start + from_size, end_token)
            while token < end and not stop.is_set():
                until = min(end, (token // to_size + 1) * to_size)
                self._copy(rows[index], token - block_start, blocks[block_table[token // to_size]], token % to_size, until - token)
                token = until
        self._pool.settle()

    def _copy(self, source: Any, source_slot: int, destination: Any, slot: int, num_tokens: int) -> None:
        """Copies tokens of one block into one block, heads in the finest parts that both sides have as runs. numpy assigns without the GIL."""
        for part in range(self._num_parts):
            piece = _part(source, self._source, part, self._num_parts)[:, :, source_slot : source_slot + num_tokens]
            _part(destination, self._own, part, self._num_parts)[:, :, slot : slot + num_tokens] = piece


def _part(block: Any, layout: KvLayout, part: int, num_parts: int) -> Any:
    """The bytes [layer, K or V, token, head bytes] of one of `num_parts` equal parts of a block's heads."""
    per_shard = num_parts // layout.num_head_shards
    head_bytes = layout.block_bytes // (layout.num_layers * 2 * layout.block_size * num_parts)
    shape = (layout.num_head_shards, layout.num_layers, 2, layout.block_size, per_shard, head_bytes)
    return block.reshape(shape)[part // per_shard, :, :, :, part % per_shard]
