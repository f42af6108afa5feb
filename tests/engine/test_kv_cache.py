"""The pool's memory can be read by who is given it, never written, never cut; what lies where is where the offsets say."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import struct
import threading
from dataclasses import replace

import pytest

from engine.block_pool import BlockPool
from engine.kv_cache import SEALS, HostKvCache, KvLayout

_LAYOUT = KvLayout("abc", "float16", num_layers=3, num_kv_heads=5, head_dim=2, block_size=7)
_NUM_BLOCKS = 11


@pytest.fixture
def kv_cache() -> HostKvCache:
    return HostKvCache(_LAYOUT, _NUM_BLOCKS, probe_bytes=100)


def test_a_block_has_all_layers_keys_and_values() -> None:
    assert _LAYOUT.block_bytes == 3 * 2 * 7 * 5 * 2 * 2


def test_the_memory_cannot_be_mapped_for_writing_again_nor_written_nor_sealed_further(kv_cache: HostKvCache) -> None:
    assert fcntl.fcntl(kv_cache.fd, fcntl.F_GET_SEALS) == SEALS
    with pytest.raises(PermissionError):
        mmap.mmap(kv_cache.fd, kv_cache.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(kv_cache.fd, b"x", 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(kv_cache.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    kv_cache.close()


@pytest.mark.parametrize("change", [-1, 1])
def test_the_memory_can_neither_shrink_under_a_reader_nor_grow(kv_cache: HostKvCache, change: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(kv_cache.fd, kv_cache.num_bytes + change)
    assert os.fstat(kv_cache.fd).st_size == kv_cache.num_bytes
    kv_cache.close()


def test_a_reader_sees_blocks_probe_and_generations_where_the_offsets_say_and_as_they_change(kv_cache: HostKvCache) -> None:
    with mmap.mmap(kv_cache.fd, kv_cache.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        assert mapping[kv_cache.probe_offset :][:100] == kv_cache.probe.tobytes() != bytes(100)
        kv_cache.blocks[:] = 7
        kv_cache.blocks[10] = 9  # the pool stays writable behind its seals
        assert mapping[: 11 * _LAYOUT.block_bytes] == bytes([7]) * (10 * _LAYOUT.block_bytes) + bytes([9]) * _LAYOUT.block_bytes
        pool = BlockPool(_NUM_BLOCKS, kv_cache.generations)
        assert pool.allocate("sequence:a", 2) == [0, 1]
        assert struct.unpack_from("=11I", mapping, kv_cache.generations_offset) == (1, 1) + (0,) * 9
        pool.release("sequence:a")
        assert struct.unpack_from("=11I", mapping, kv_cache.generations_offset) == (2, 2) + (0,) * 9
    kv_cache.close()


def test_the_parts_are_aligned_and_do_not_overlap(kv_cache: HostKvCache) -> None:
    assert kv_cache.probe_offset >= _NUM_BLOCKS * _LAYOUT.block_bytes
    assert kv_cache.generations_offset >= kv_cache.probe_offset + 100
    assert kv_cache.num_bytes == kv_cache.generations_offset + 4 * _NUM_BLOCKS
    assert kv_cache.probe_offset % 64 == kv_cache.generations_offset % 64 == 0
    kv_cache.close()


def test_two_pools_have_other_probes() -> None:
    one, other = HostKvCache(_LAYOUT, 1), HostKvCache(_LAYOUT, 1)
    assert one.probe.tobytes() != other.probe.tobytes()
    for each in (one, other):
        each.close()


def test_a_closed_pool_gives_its_descriptor_back_once_and_stays_mapped(kv_cache: HostKvCache) -> None:
    descriptor = kv_cache.fd
    kv_cache.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    kv_cache.close()
    kv_cache.blocks[0] = 1


def test_other_threads_run_while_a_large_pool_gets_its_memory() -> None:
    layout = replace(_LAYOUT, num_layers=64, head_dim=64, block_size=64)
    made, num_turns, pools = threading.Event(), 0, list[HostKvCache]()

    def make() -> None:
        pools.append(HostKvCache(layout, (256 << 20) // layout.block_bytes))
        made.set()

    thread = threading.Thread(target=make)
    thread.start()
    while not made.wait(0.001):
        num_turns += 1
    thread.join()
    pools.pop().close()
    assert num_turns > 10


def test_a_pool_that_gets_no_memory_leaves_no_descriptor() -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            HostKvCache(replace(_LAYOUT, num_layers=64), 1 << 12)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert len(os.listdir("/proc/self/fd")) == num_fds
