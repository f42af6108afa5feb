"""Around a reader: segments, budgets, digests, conversion."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.budget import ByteBudget
from kvtransfer.errors import DigestError, HandoverProtocolError, NoTransportError
from kvtransfer.memories import HostBlocks
from kvtransfer.path import Destination, KvPath, PathParts, block_range, segments
from tandem.v1 import kv_pb2
from tests.kvtransfer.scripted import ScriptedReader
from tests.support.fake_device import FAKE_LAYOUT

BLOCK_BYTES = FAKE_LAYOUT.block_bytes
TABLE = [3, 1, 4, 0, 5, 9, 2, 6]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def _parts(executor: ThreadPoolExecutor, budgets: Sequence[int] = (1 << 20, 1 << 20), *, checksum: bool = False, block_size: int = 4) -> PathParts:
    layout = replace(FAKE_LAYOUT, block_size=block_size)
    pool = HostBlocks(np.zeros((16, layout.block_bytes), np.uint8))
    return PathParts(pool, layout, executor, [ByteBudget(max_bytes) for max_bytes in budgets], checksum)


def _pool(parts: PathParts) -> HostBlocks:
    assert isinstance(parts.pool, HostBlocks)
    return parts.pool


def _ready(first_block: int, num_blocks: int, digests: Sequence[int] = ()) -> kv_pb2.KvReady:
    return kv_pb2.KvReady(hold_id="hold", first_block=first_block, num_blocks=num_blocks, digests=digests)


def _digests(first_block: int, num_blocks: int) -> list[int]:
    """Of what a scripted reader brings."""
    return HostBlocks(np.repeat(np.arange(16, dtype=np.uint8)[:, None], BLOCK_BYTES, axis=1)).digests(range(first_block, first_block + num_blocks))


def test_segments_cut_what_is_told_block_by_block_with_the_run() -> None:
    ready = kv_pb2.KvReady(hold_id="hold", first_block=7, num_blocks=5, block_ids=range(10, 15), generations=range(21, 31, 2), digests=range(5))
    cut = list(segments(ready, 2))
    assert [(one.first_block, one.num_blocks, one.hold_id) for one in cut] == [(7, 2, "hold"), (9, 2, "hold"), (11, 1, "hold")]
    assert [list(one.block_ids) for one in cut] == [[10, 11], [12, 13], [14]]
    assert [list(one.generations) for one in cut] == [[21, 23], [25, 27], [29]]
    assert [list(one.digests) for one in cut] == [[0, 1], [2, 3], [4]]
    assert list(segments(ready, 5)) == [ready]


@pytest.mark.parametrize(
    ("cached", "tokens", "size", "expected"),
    [(0, 22, 4, (0, 6)), (8, 22, 4, (2, 6)), (8, 22, 16, (0, 2)), (20, 20, 4, (5, 5)), (20, 20, 16, (2, 2)), (16, 17, 16, (1, 2)), (1, 1, 4, (1, 1))],
)
def test_both_sides_count_the_same_blocks(cached: int, tokens: int, size: int, expected: tuple[int, int]) -> None:
    assert block_range(cached, tokens, size) == expected


@pytest.mark.parametrize(("max_segment_blocks", "budget_blocks", "expected"), [(8, 8, [6]), (4, 8, [4, 2]), (8, 3, [3, 3]), (0, 8, [1] * 6), (8, 0, [1] * 6)])
async def test_a_segment_is_bounded_by_the_reader_and_by_the_budgets(
    executor: ThreadPoolExecutor, max_segment_blocks: int, budget_blocks: int, expected: list[int]
) -> None:
    parts = _parts(executor, (1 << 20, budget_blocks * BLOCK_BYTES or 1))
    reader = ScriptedReader(max_segment_bytes=max_segment_blocks * BLOCK_BYTES)
    await KvPath(parts, reader, FAKE_LAYOUT, 1.0).read(_ready(1, 6), Destination("d", TABLE, 4, 28))
    assert [run.num_blocks for run in reader.runs] == expected
    assert [int(_pool(parts).array[block, 0]) for block in TABLE] == [0, 1, 2, 3, 4, 5, 6, 0]


async def test_a_slow_peer_leaves_the_others_their_share(executor: ThreadPoolExecutor) -> None:
    total, gate = ByteBudget(4 * BLOCK_BYTES), asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    slow, quick = ScriptedReader(read=wait), ScriptedReader()
    parts = _parts(executor)
    paths = [KvPath(replace(parts, budgets=(ByteBudget(2 * BLOCK_BYTES), total)), reader, FAKE_LAYOUT, 1.0) for reader in (slow, quick)]
    to = Destination("d", TABLE, 0, 32)
    stuck = [asyncio.ensure_future(paths[0].read(_ready(0, 8), to)) for _ in range(3)]
    await asyncio.wait_for(slow.began.wait(), 5)
    await asyncio.gather(*(asyncio.wait_for(paths[1].read(_ready(0, 8), to), 5) for _ in range(3)))
    assert len(quick.runs) == 12
    assert (slow.most_bytes, quick.most_bytes) == (2 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert total.num_free_bytes == 2 * BLOCK_BYTES
    for one in stuck:
        one.cancel()
    await asyncio.wait(stuck)
    assert total.num_free_bytes == total.max_bytes
    assert slow.num_running == 0


async def test_peers_together_keep_within_the_total(executor: ThreadPoolExecutor) -> None:
    total = ByteBudget(3 * BLOCK_BYTES)
    most = 0

    async def look() -> None:
        nonlocal most
        most = max(most, total.max_bytes - total.num_free_bytes)
        await asyncio.sleep(0)

    parts = _parts(executor)
    paths = [KvPath(replace(parts, budgets=(ByteBudget(2 * BLOCK_BYTES), total)), ScriptedReader(read=look), FAKE_LAYOUT, 1.0) for _ in range(4)]
    await asyncio.gather(*(path.read(_ready(0, 8), Destination("d", TABLE, 0, 32)) for path in paths))
    assert most == 2 * BLOCK_BYTES  # a third block would be another peer's, whose segments have two
    assert total.num_free_bytes == total.max_bytes


async def test_a_cancel_while_waiting_for_the_total_gives_the_peers_share_back(executor: ThreadPoolExecutor) -> None:
    own, total = ByteBudget(2 * BLOCK_BYTES), ByteBudget(2 * BLOCK_BYTES)
    reader = ScriptedReader()
    path = KvPath(replace(_parts(executor), budgets=(own, total)), reader, FAKE_LAYOUT, 1.0)
    async with total.take(total.max_bytes):
        reading = asyncio.ensure_future(path.read(_ready(0, 2), Destination("d", TABLE, 0, 8)))
        while own.num_free_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
    assert (own.num_free_bytes, total.num_free_bytes, reader.runs) == (own.max_bytes, total.max_bytes, [])


async def test_digests_are_verified_when_they_come_and_missed_when_they_were_asked_for(executor: ThreadPoolExecutor) -> None:
    to = Destination("d", TABLE, 0, 24)
    for checksum in (False, True):
        path = KvPath(_parts(executor, checksum=checksum), ScriptedReader(max_segment_bytes=2 * BLOCK_BYTES), FAKE_LAYOUT, 1.0)
        await path.read(_ready(0, 6, _digests(0, 6)), to)
        with pytest.raises(DigestError, match="of 1 blocks are wrong, the first is block 4"):
            await path.read(_ready(0, 6, [*_digests(0, 4), 0, _digests(5, 1)[0]]), to)
        with pytest.raises(DigestError, match="5 digests came for 6 blocks"):
            await path.read(_ready(0, 6, _digests(0, 5)), to)
    with pytest.raises(DigestError, match="no digests"):
        await path.read(_ready(0, 6), to)
    await KvPath(_parts(executor), ScriptedReader(), FAKE_LAYOUT, 1.0).read(_ready(0, 6), to)


@pytest.mark.parametrize("name", ["block_ids", "generations"])
async def test_what_is_told_block_by_block_is_told_of_each_before_anything_is_read(executor: ThreadPoolExecutor, name: str) -> None:
    reader = ScriptedReader(max_segment_bytes=BLOCK_BYTES)
    ready = _ready(0, 6)
    getattr(ready, name).extend(range(1, 6))
    with pytest.raises(HandoverProtocolError, match="5 "):
        await KvPath(_parts(executor), reader, FAKE_LAYOUT, 1.0).read(ready, Destination("d", TABLE, 0, 24))
    assert reader.runs == []


async def test_blocks_of_another_size_are_converted_and_verified_as_they_came(executor: ThreadPoolExecutor) -> None:
    parts = _parts(executor, (2 * BLOCK_BYTES, 1 << 20), block_size=8, checksum=True)
    reader = ScriptedReader()
    path = KvPath(parts, reader, FAKE_LAYOUT, 1.0)
    to = Destination("d", TABLE, 8, 22)
    assert (path.source_range(to), path.own_range(to)) == ((2, 6), (1, 3))
    await path.read(_ready(2, 4, _digests(2, 4)), to)
    tokens = _pool(parts).array.reshape(16, 2, 8, 16)
    assert (tokens[TABLE[1], :, :4] == 2).all()
    assert (tokens[TABLE[1], :, 4:] == 3).all()
    assert (tokens[TABLE[2], :, :4] == 4).all()
    assert (tokens[TABLE[2], :, 4:6] == 5).all()
    assert not tokens[TABLE[2], :, 6:].any()
    assert not np.delete(tokens, [TABLE[1], TABLE[2]], axis=0).any()
    with pytest.raises(DigestError):
        await path.read(_ready(2, 4, _digests(3, 4)), to)


class _OtherMemory:
    num_blocks, block_bytes = 16, 2 * BLOCK_BYTES

    def digests(self, ids: Sequence[int]) -> list[int]:
        raise AssertionError


def test_memory_that_cannot_be_converted_into_is_refused_with_what_differs(executor: ThreadPoolExecutor) -> None:
    parts = replace(_parts(executor, block_size=8), pool=_OtherMemory())
    with pytest.raises(NoTransportError, match="block_size 4 for 8"):
        KvPath(parts, ScriptedReader(), FAKE_LAYOUT, 1.0)
