"""Any two layouts that hold the same elements are converted element by element, and nothing else is touched."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv_cache import KvLayout
from kvtransfer.conversion import Conversion, unlike
from kvtransfer.memories import Blocks, HostBlocks
from kvtransfer.path import block_range
from tandem.v1 import kv_pb2

_HEADS, _LAYERS, _HEAD_DIM = 12, 2, 2
_UNTOUCHED = 255


def _layout(block_size: int, num_head_shards: int) -> KvLayout:
    return KvLayout("abc", "float16", _LAYERS, _HEADS, _HEAD_DIM, block_size, num_head_shards=num_head_shards)


def _offset(layout: KvLayout, slot: int, layer: int, which: int, head: int) -> int:
    """First byte of a head's elements in a block: the layout's words, [head shard][layer][K, V][token][head of the shard][element], one by one."""
    per_shard = layout.num_kv_heads // layout.num_head_shards
    shard, within = divmod(head, per_shard)
    index = (((shard * layout.num_layers + layer) * 2 + which) * layout.block_size + slot) * per_shard + within
    return index * layout.head_dim * 2


def _head(blocks: Blocks, layout: KvLayout, block: int, slot: int, layer: int, which: int, head: int) -> Blocks:
    start = _offset(layout, slot, layer, which, head)
    return blocks[block, start : start + layout.head_dim * 2]


@dataclass(frozen=True)
class Case:
    """A hand-over between two layouts, cut into runs."""

    source: KvLayout
    own: KvLayout
    num_cached_tokens: int
    num_tokens: int
    cuts: tuple[int, ...]
    block_table: tuple[int, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any two block sizes and shard counts that divide the heads, any cached prefix, any length."""
    sizes, shards = st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 6, 12])
    source, own = _layout(draw(sizes), draw(shards)), _layout(draw(sizes), draw(shards))
    num_tokens = draw(st.integers(1, 40))
    cached = draw(st.integers(0, num_tokens // own.block_size)) * own.block_size
    first, end = block_range(cached, num_tokens, source.block_size)
    cuts = tuple(sorted(draw(st.sets(st.integers(first, max(end - 1, first)), max_size=3))))
    num_own_blocks = -(-num_tokens // own.block_size)
    return Case(source, own, cached, num_tokens, cuts, tuple(draw(st.permutations(range(num_own_blocks + 2)))))


def _expected(case: Case, theirs: Blocks, ours: Blocks) -> None:
    """The same by definition, one head of one token after the other."""
    for token in range(case.num_cached_tokens, case.num_tokens):
        block, slot = divmod(token, case.own.block_size)
        for layer, which, head in itertools.product(range(_LAYERS), range(2), range(_HEADS)):
            source = _head(theirs, case.source, token // case.source.block_size, token % case.source.block_size, layer, which, head)
            _head(ours, case.own, case.block_table[block], slot, layer, which, head)[:] = source


@settings(max_examples=150, deadline=None)
@given(cases())
def test_conversion_is_the_copy_of_each_element_and_touches_no_other(case: Case) -> None:
    num_source_blocks = -(-case.num_tokens // case.source.block_size)
    theirs = np.random.default_rng(case.num_tokens).integers(0, _UNTOUCHED, (num_source_blocks, case.source.block_bytes), np.uint8)
    pool = HostBlocks(np.full((len(case.block_table), case.own.block_bytes), _UNTOUCHED, np.uint8))
    expected = pool.array.copy()
    _expected(case, theirs, expected)
    conversion = Conversion(case.source, case.own, pool, 1 << 20)
    first, end = block_range(case.num_cached_tokens, case.num_tokens, case.source.block_size)
    for start, until in itertools.pairwise([first, *(cut for cut in case.cuts if cut > first), end]):
        with conversion.staging(until - start) as staged:
            assert isinstance(staged, HostBlocks)
            staged.array[: until - start] = theirs[start:until]
            run = kv_pb2.KvReady(first_block=start, num_blocks=until - start)
            conversion.scatter(staged, run, case.block_table, case.num_cached_tokens, case.num_tokens, threading.Event())
    assert (pool.array == expected).all()


def test_equal_layouts_need_no_conversion() -> None:
    pool = HostBlocks(np.zeros((1, _layout(4, 1).block_bytes), np.uint8))
    assert Conversion.between(_layout(4, 1), _layout(4, 1), pool, max_kept_bytes=1) is None
    assert Conversion.between(_layout(4, 2), _layout(4, 1), pool, max_kept_bytes=1) is not None


def test_a_scatter_that_is_stopped_ends_at_once() -> None:
    source, own = _layout(4, 1), _layout(2, 1)
    pool, stop = HostBlocks(np.zeros((4, own.block_bytes), np.uint8)), threading.Event()
    stop.set()
    conversion = Conversion(source, own, pool, 1)
    conversion.scatter(HostBlocks(np.ones((2, source.block_bytes), np.uint8)), kv_pb2.KvReady(num_blocks=2), [0, 1, 2, 3], 0, 8, stop)
    assert not pool.array.any()


def test_staged_memory_is_used_again_never_twice_at_once_and_bounded() -> None:
    source = _layout(4, 1)
    pool = HostBlocks(np.zeros((1, _layout(2, 1).block_bytes), np.uint8))
    conversion = Conversion(source, _layout(2, 1), pool, 10 * source.block_bytes)
    with conversion.staging(4) as first, conversion.staging(4) as second, conversion.staging(2) as third:
        assert len({id(first), id(second), id(third)}) == 3
    with conversion.staging(2) as small:
        assert small is third  # the least that fits
        with conversion.staging(3) as again:
            assert again in (first, second)
            assert again.num_blocks == 4
    with conversion.staging(8) as large:
        assert large.num_blocks == 8
    kept = []
    with conversion.staging(8) as one, conversion.staging(1) as other:
        kept = [one, other]
    assert kept[0] is large
    assert kept[1].num_blocks <= 2  # the ones of 4 went: with the large one they were more than the bound
    with conversion.staging(99) as beyond, conversion.staging(1):
        pass
    with conversion.staging(99) as still:
        assert still is beyond  # one is always kept


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"block_size": 32}, set()),
        ({"num_head_shards": 4}, set()),
        ({"block_size": 3, "num_head_shards": 12}, set()),
        ({"num_head_shards": 5}, {"num_head_shards"}),
        ({"num_head_shards": 0}, {"num_head_shards"}),
        ({"num_head_shards": 24}, {"num_head_shards"}),
        ({"block_size": 0}, {"num_head_shards"}),
        ({"dtype": "bfloat16"}, {"dtype"}),
        ({"dtype": "float8"}, {"dtype"}),
        ({"version": 2}, {"version"}),
        ({"num_layers": 3, "num_kv_heads": 6}, {"num_layers", "num_kv_heads"}),
        ({"model_fingerprint": "other"}, {"model_fingerprint"}),
    ],
    ids=str,
)
def test_only_block_size_and_shards_may_differ_and_only_where_they_divide(change: dict[str, object], found: set[str]) -> None:
    own = _layout(16, 1)
    other = replace(own, **change)  # type: ignore[arg-type]
    assert set(unlike(own, other)) == set(unlike(other, own)) == found
