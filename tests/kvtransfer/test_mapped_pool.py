"""A pool is mapped only if nobody can cut it or write to it from here, and unmapped only behind its last reader."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import mmap
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.kv_cache import SEALS, HostKvCache, KvLayout
from engine.proto import kv_layout_to_proto
from kvtransfer import sealed_mapping
from kvtransfer.errors import NoTransportError, SourceGoneError
from kvtransfer.mapped_pool import MappedPool, PoolPlan
from kvtransfer.sealed_mapping import SealedMapping
from tandem.v1 import prefill_pb2
from tests.kvtransfer.ends import until

LAYOUT = KvLayout("f" * 64, "bfloat16", 2, 2, 16, 16)
NUM_BLOCKS = 64


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.fixture
def cache() -> Iterator[HostKvCache]:
    made = HostKvCache(LAYOUT, NUM_BLOCKS)
    made.blocks[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
    made.generations[:] = np.arange(1, 2 * NUM_BLOCKS, 2, dtype=np.uint32).data
    yield made
    made.close()


@pytest.fixture
async def pool(cache: HostKvCache, executor: Executor) -> AsyncIterator[MappedPool]:
    mapped = MappedPool(cache.fd, PoolPlan.of(cache), executor)
    yield mapped
    mapped.close()


def _num_mapped() -> int:
    """Read-only mappings of pools."""
    gc.collect()
    return len(re.findall(r" r--s .*memfd:tandem-kv", Path("/proc/self/maps").read_text()))


def _resident_kib() -> int:
    """Of the one read-only mapping."""
    resident = re.search(r" r--s .*memfd:tandem-kv(?:.*\n)+?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert resident
    return int(resident[1])


def _offer(cache: HostKvCache) -> prefill_pb2.PairResponse:
    return prefill_pb2.PairResponse(layout=kv_layout_to_proto(LAYOUT), num_blocks=NUM_BLOCKS, probe_bytes=len(cache.probe))


async def test_blocks_probe_and_generations_are_those_of_prefill(cache: HostKvCache, pool: MappedPool) -> None:
    await pool.populate()
    with pool.reading():
        assert (pool.blocks == cache.blocks).all() and (pool.probe == cache.probe).all()
        ids, generations = np.array([5, 0, 63], np.int64), np.array([11, 1, 127], np.uint32)
        assert pool.are_held(ids, generations)
        cache.blocks[7] = 99
        assert (pool.blocks[7] == 99).all()
        cache.generations[0] += 2
        assert not pool.are_held(ids, generations) and pool.are_held(ids[[0, 2]], generations[[0, 2]])


async def test_nobody_writes_to_the_pool_from_here(cache: HostKvCache, pool: MappedPool) -> None:
    with pool.reading(), pytest.raises(ValueError, match="read-only"):
        pool.blocks[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(cache.fd, cache.num_bytes)
    for write in (lambda: os.pwrite(cache.fd, b"x", 0), lambda: os.ftruncate(cache.fd, 0), lambda: fcntl.fcntl(cache.fd, fcntl.F_ADD_SEALS, 0)):
        with pytest.raises(PermissionError):
            write()


@pytest.mark.parametrize(
    "missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, 0x10, fcntl.F_SEAL_SEAL, SEALS], ids=["shrink", "grow", "future write", "seal", "all"]
)
def test_memory_that_lacks_a_seal_is_refused(missing: int, executor: Executor) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS & ~missing)
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoTransportError, match="not sealed"):
        SealedMapping(fd, 4096, executor)
    assert len(os.listdir("/proc/self/fd")) <= num_fds
    os.close(fd)


@pytest.mark.parametrize("more", [-4096, 4096])
def test_memory_of_another_size_is_refused(more: int, cache: HostKvCache, executor: Executor) -> None:
    with pytest.raises(NoTransportError, match="bytes, expected"):
        SealedMapping(cache.fd, cache.num_bytes + more, executor)


def test_what_is_no_memory_is_refused(tmp_path: Path, executor: Executor) -> None:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    for fd in (file, *os.pipe()):
        with pytest.raises(NoTransportError):
            SealedMapping(fd, 4096, executor)
        os.close(fd)


async def test_populate_maps_every_page(cache: HostKvCache, pool: MappedPool) -> None:
    await pool.populate()
    assert _resident_kib() == -(-cache.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE // 1024


async def test_a_closed_mapping_takes_no_new_reader(pool: MappedPool) -> None:
    pool.close()
    with pytest.raises(SourceGoneError), pool.reading():
        pass
    with pytest.raises(SourceGoneError):
        await pool.populate()


async def test_the_last_reader_unmaps_and_nobody_before(cache: HostKvCache, executor: Executor) -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    pool = MappedPool(cache.fd, PoolPlan.of(cache), executor)
    with pool.reading():
        with pool.reading():
            pool.close()
            pool.close()
        await asyncio.get_running_loop().run_in_executor(executor, lambda: None)
        assert (pool.blocks[3] == 3).all() and _num_mapped() == 1
    await until(lambda: _num_mapped() == 0 and len(os.listdir("/proc/self/fd")) <= num_fds)


async def test_a_mapping_outlives_its_executor_and_goes_all_the_same(cache: HostKvCache) -> None:
    executor = ThreadPoolExecutor(1)
    pool = MappedPool(cache.fd, PoolPlan.of(cache), executor)
    executor.shutdown()
    assert _num_mapped() == 1
    pool.close()
    await until(lambda: _num_mapped() == 0)


async def test_a_large_pool_that_is_mapped_or_unmapped_holds_up_no_copy(cache: HostKvCache, executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    may_unmap, calls = threading.Event(), list[int]()
    populate = sealed_mapping._MADV_POPULATE_READ

    def madvise(address: int, size: int, advice: int) -> int:
        calls.append(advice)
        if advice == mmap.MADV_DONTNEED:
            assert may_unmap.wait(10)
        return 0

    monkeypatch.setattr(sealed_mapping, "_libc", SimpleNamespace(madvise=madvise))
    monkeypatch.setattr(sealed_mapping, "_AT_ONCE_BYTES", 1 << 16)
    pool = MappedPool(cache.fd, PoolPlan.of(cache), executor)
    mapping = asyncio.create_task(pool.populate())
    await asyncio.sleep(0)
    num_before = await asyncio.get_running_loop().run_in_executor(executor, lambda: len(calls))
    await mapping
    assert num_before < calls.count(populate) == -(-cache.num_bytes // (1 << 16))
    pool.close()
    async with asyncio.timeout(5):
        await asyncio.get_running_loop().run_in_executor(executor, lambda: None)
    assert _num_mapped() == 1
    may_unmap.set()
    await until(lambda: _num_mapped() == 0)


async def test_mapping_all_of_a_pool_ends_in_time_and_says_what_is_not_mapped(
    cache: HostKvCache, executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sealed_mapping, "_AT_ONCE_BYTES", 1 << 16)
    mapping = SealedMapping(cache.fd, cache.num_bytes, executor)
    with caplog.at_level(logging.WARNING):
        await mapping.populate(max_s=0.0)
    assert "are mapped after 0 s" in caplog.text and _resident_kib() < cache.num_bytes // 1024
    with mapping.reading():
        assert (mapping.view(3 * LAYOUT.block_bytes, LAYOUT.block_bytes) == 3).all()
    mapping.close()


async def test_a_view_that_outlives_its_reader_is_reported_and_still_readable(cache: HostKvCache, executor: Executor, caplog: pytest.LogCaptureFixture) -> None:
    pool = MappedPool(cache.fd, PoolPlan.of(cache), executor)
    with pool.reading():
        blocks = pool.blocks
    with caplog.at_level(logging.ERROR):
        pool.close()
        await until(lambda: "has outlived its reader" in caplog.text)
    assert (blocks[5] == 5).all()
    del blocks
    await until(lambda: _num_mapped() == 0)


async def test_a_cancelled_populate_has_ended_and_can_be_closed_behind(cache: HostKvCache, pool: MappedPool) -> None:
    task = asyncio.create_task(pool.populate())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    pool.close()
    await until(lambda: _num_mapped() == 0)


def test_a_plan_comes_through(cache: HostKvCache) -> None:
    plan = PoolPlan.of(cache)
    assert PoolPlan.decode(plan.encode(), _offer(cache)) == plan


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": NUM_BLOCKS + 1},
        {"block_bytes": LAYOUT.block_bytes * 2},
        {"probe_bytes": 1},
        {"probe_offset": NUM_BLOCKS * LAYOUT.block_bytes - 1},
        {"probe_offset": 1 << 63},
        {"generations_offset": 4},
        {"generations_offset": 1 << 63},
        {"generations_offset": NUM_BLOCKS * LAYOUT.block_bytes + (1 << 20) + 1},
        {"num_bytes": NUM_BLOCKS * LAYOUT.block_bytes + (1 << 20)},
        {"num_bytes": 0},
    ],
    ids=str,
)
def test_a_plan_that_is_not_that_of_the_offer_or_does_not_fit_is_refused(change: dict[str, int], cache: HostKvCache) -> None:
    with pytest.raises(NoTransportError):
        PoolPlan.decode(replace(PoolPlan.of(cache), **change).encode(), _offer(cache))


@pytest.mark.parametrize("encoded", [b"", bytes(47), bytes(49)])
def test_a_plan_of_another_length_is_refused(encoded: bytes, cache: HostKvCache) -> None:
    with pytest.raises(NoTransportError):
        PoolPlan.decode(encoded, _offer(cache))
