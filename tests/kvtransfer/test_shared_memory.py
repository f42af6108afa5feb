"""`shared_memory` between two processes, and what it refuses. What it shares with all transports is in the contract suite."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.block_copy import CopyStop, Ids, copy_blocks
from kvtransfer.choice import choose
from kvtransfer.descriptor_sockets import DescriptorSockets
from kvtransfer.errors import HandoverProtocolError, NoTransportError, SourceGoneError
from kvtransfer.host_pool import HostPool
from kvtransfer.memories import Blocks, HostBlocks
from kvtransfer.pairing import Pairing
from kvtransfer.shared_memory import SharedMemoryReader, SharedMemorySource
from kvtransfer.transport import Rows
from tandem.v1 import prefill_pb2
from tests.kvtransfer.ends import until
from tests.kvtransfer.shared_memory_process import LAYOUT, NUM_BLOCKS, all_blocks, make_pool, make_response, make_start, open_source

_EVERY_BLOCK = range(NUM_BLOCKS)


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = make_pool()
    yield made
    made.kv_cache.close()


@pytest.fixture
async def source(pool: HostPool, tmp_path: Path) -> AsyncIterator[SharedMemorySource]:
    async with open_source(pool, tmp_path) as opened:
        yield opened


def _destination() -> HostBlocks:
    return HostBlocks(np.full((NUM_BLOCKS, LAYOUT.block_bytes), 255, np.uint8))


def _is_copied(destination: HostBlocks) -> bool:
    return bool((destination.array == np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]).all())


def _num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _num_mapped() -> int:
    """Read-only mappings of pools."""
    gc.collect()
    return len(re.findall(r" r--s .*memfd:tandem-kv", Path("/proc/self/maps").read_text()))


class _Other:
    """The other end, in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def say(self, message: prefill_pb2.PairStart | prefill_pb2.PairResponse) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(message.SerializeToString().hex().encode() + b"\n")
        await self._process.stdin.drain()

    async def hear(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.readline(), 20)).decode().strip()

    async def hear_response(self) -> prefill_pb2.PairResponse:
        return prefill_pb2.PairResponse.FromString(bytes.fromhex(await self.hear()))

    async def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        assert await self._process.wait() == -signal.SIGKILL


@asynccontextmanager
async def _other(role: str, directory: Path) -> AsyncIterator[_Other]:
    arguments = ("-m", "tests.kvtransfer.shared_memory_process", role, str(directory))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    try:
        yield _Other(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _greeted(other: _Other, reader: SharedMemoryReader, start: prefill_pb2.PairStart | None = None) -> prefill_pb2.PairResponse:
    """Prefill's answer to what the reader's end says."""
    start = start or make_start()
    reader.greet(start)
    await other.say(start)
    return await other.hear_response()


async def _attached(pool: HostPool, source: SharedMemorySource, reader: SharedMemoryReader) -> Pairing:
    """A pairing within this process."""
    start = make_start()
    reader.greet(start)
    pairing = Pairing(start)
    response = await make_response(pool, source, pairing)
    await reader.attach(response, response.sources[0])
    return pairing


async def test_decode_chooses_and_reads_a_pool_of_another_process(tmp_path: Path, executor: Executor) -> None:
    async with _other("prefill", tmp_path) as prefill:
        reader, destination = SharedMemoryReader(executor, tmp_path), _destination()
        response = await _greeted(prefill, reader)
        chosen = await choose(response, [reader], min_bytes_per_s=1e6)
        assert chosen.reader is reader and chosen.bytes_per_s > 1e6
        await reader.read(all_blocks(), Rows(destination, _EVERY_BLOCK))
        assert _is_copied(destination)
        reader.close()


async def test_a_pool_stays_readable_when_prefill_is_killed_and_goes_with_the_reader(tmp_path: Path, executor: Executor) -> None:
    begun, killed = threading.Event(), threading.Event()

    def copy(source: Blocks, source_ids: Sequence[int] | Ids, destination: Blocks, destination_ids: Sequence[int] | Ids, stop: CopyStop) -> bool:
        half = len(source_ids) // 2
        copy_blocks(source, source_ids[:half], destination, destination_ids[:half], stop)
        begun.set()
        assert killed.wait(20)
        return copy_blocks(source, source_ids[half:], destination, destination_ids[half:], stop)

    async with _other("prefill", tmp_path) as prefill:
        num_fds = _num_fds()
        reader, destination = SharedMemoryReader(executor, tmp_path, copy=copy), _destination()
        response = await _greeted(prefill, reader)
        await reader.attach(response, response.sources[0])
        read = asyncio.create_task(reader.read(all_blocks(), Rows(destination, _EVERY_BLOCK)))
        await until(begun.is_set)
        await prefill.kill()
        reader.close()
        assert _num_mapped() == 1
        killed.set()
        await read
        assert _is_copied(destination)
        await until(lambda: _num_mapped() == 0)
        with pytest.raises(SourceGoneError):
            await reader.read(all_blocks(), Rows(destination, _EVERY_BLOCK))
    await until(lambda: _num_fds() <= num_fds)
    async with open_source(make_pool(), tmp_path):
        assert len(os.listdir(tmp_path)) == 1  # what the dead one left is gone


async def test_nothing_is_left_of_a_decode_that_is_killed_while_it_copies(
    pool: HostPool, source: SharedMemorySource, tmp_path: Path, executor: Executor
) -> None:
    num_fds = _num_fds()
    async with _other("decode", tmp_path) as decode:
        pairing = Pairing(prefill_pb2.PairStart.FromString(bytes.fromhex(await decode.hear())))
        await decode.say(await make_response(pool, source, pairing))
        assert (await decode.hear(), await decode.hear()) == ("attached", "copying")
        await decode.kill()
        source.withdraw(pairing.pairing_id)
    await until(lambda: _num_fds() == num_fds)
    assert len(os.listdir(tmp_path)) == 1
    reader, destination = SharedMemoryReader(executor, tmp_path), _destination()
    await _attached(pool, source, reader)
    await reader.read(all_blocks(), Rows(destination, _EVERY_BLOCK))
    assert _is_copied(destination)
    reader.close()


async def test_a_decode_without_the_key_gets_no_pool(tmp_path: Path, executor: Executor) -> None:
    async with _other("prefill", tmp_path) as prefill:
        impostor, reader = SharedMemoryReader(executor, tmp_path), SharedMemoryReader(executor, tmp_path)
        response = await _greeted(prefill, reader)
        impostor.greet(make_start())  # with a nonce of its own
        with pytest.raises(NoTransportError):
            await impostor.attach(response, response.sources[0])
        await reader.attach(response, response.sources[0])
        with pytest.raises(NoTransportError):  # once
            await reader.attach(response, response.sources[0])
        reader.close()


async def test_a_prefill_without_the_key_is_not_believed(tmp_path: Path, executor: Executor) -> None:
    async with _other("prefill", tmp_path) as impostor:
        reader = SharedMemoryReader(executor, tmp_path)
        response = await _greeted(impostor, reader)
        response.nonce = secrets.token_bytes(32)  # the real one's, of whose pairing the impostor knows the id only
        with pytest.raises(NoTransportError):
            await reader.attach(response, response.sources[0])
        assert _num_mapped() == 0


async def test_descriptors_and_mappings_are_back_to_where_they_were_after_100_pairings(
    pool: HostPool, source: SharedMemorySource, tmp_path: Path, executor: Executor
) -> None:
    async def pair(index: int) -> None:
        reader, destination = SharedMemoryReader(executor, tmp_path), _destination()
        pairing = await _attached(pool, source, reader)
        if index % 2:
            await reader.probe()
            await reader.read(all_blocks(), Rows(destination, _EVERY_BLOCK))
        if index % 3:
            source.withdraw(pairing.pairing_id)
            reader.close()
        else:
            reader.close()
            source.withdraw(pairing.pairing_id)

    await pair(0)
    await until(lambda: _num_mapped() == 0)
    num_fds = _num_fds()
    for index in range(100):
        await pair(index)
    await until(lambda: _num_mapped() == 0 and _num_fds() == num_fds)


async def test_offers_that_nobody_fetches_go_with_their_pairings(pool: HostPool, source: SharedMemorySource) -> None:
    num_fds = _num_fds()
    pairings = [Pairing(make_start()) for _ in range(10)]
    for pairing in pairings:
        await make_response(pool, source, pairing)
    assert _num_fds() == num_fds + 10
    for pairing in pairings:
        source.withdraw(pairing.pairing_id)
        source.withdraw(pairing.pairing_id)
    assert _num_fds() == num_fds


@pytest.mark.parametrize(
    ("change", "reason"), [({"boot_id": "another"}, "another host"), ({"boot_id": ""}, "another host"), ({"device_uuid": "GPU-1"}, "on a GPU")], ids=str
)
async def test_what_cannot_share_memory_is_offered_none_and_told_why(change: dict[str, str], reason: str, source: SharedMemorySource) -> None:
    start = make_start()
    for name, value in change.items():
        setattr(start, name, value)
    with pytest.raises(NoTransportError, match=reason):
        await source.offer(Pairing(start))


@pytest.mark.parametrize("name", ["../" + "a" * 29, "/etc/passwd", ""])
async def test_no_path_comes_from_a_peer(name: str, pool: HostPool, source: SharedMemorySource, tmp_path: Path, executor: Executor) -> None:
    reader, start = SharedMemoryReader(executor, tmp_path), make_start()
    reader.greet(start)
    response = await make_response(pool, source, Pairing(start))
    response.sources[0].shared_memory.socket_name = name
    with pytest.raises(HandoverProtocolError):
        await reader.attach(response, response.sources[0])


async def test_a_pool_that_is_not_the_offered_one_is_not_mapped(pool: HostPool, source: SharedMemorySource, tmp_path: Path, executor: Executor) -> None:
    reader, start, num_fds = SharedMemoryReader(executor, tmp_path), make_start(), _num_fds()
    reader.greet(start)
    response = await make_response(pool, source, Pairing(start))
    response.num_blocks += 1
    with pytest.raises(NoTransportError, match="not the one that was offered"):
        await reader.attach(response, response.sources[0])
    await until(lambda: _num_mapped() == 0 and _num_fds() == num_fds)


async def test_a_cancel_ends_the_copy_before_its_end(pool: HostPool, source: SharedMemorySource, tmp_path: Path, executor: Executor) -> None:
    reader, destination, runs = SharedMemoryReader(executor, tmp_path), _destination(), 20_000
    await _attached(pool, source, reader)
    read = asyncio.create_task(reader.read(all_blocks(runs), Rows(destination, list(_EVERY_BLOCK) * runs)))
    await until(lambda: _is_copied(destination))
    assert not read.done()
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(read, 5)
    destination.array[:] = 255
    await asyncio.get_running_loop().run_in_executor(executor, lambda: None)
    assert (destination.array == 255).all()  # nobody writes any more
    reader.close()
    await until(lambda: _num_mapped() == 0)


async def test_a_reader_that_was_closed_while_it_attached_maps_nothing(pool: HostPool, source: SharedMemorySource, tmp_path: Path) -> None:
    free = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(free.wait, 20)
        reader = SharedMemoryReader(executor, tmp_path)
        attach = asyncio.create_task(_attached(pool, source, reader))
        await until(lambda: _num_mapped() == 1)
        reader.close()
        free.set()
        with pytest.raises(SourceGoneError):
            await attach
    await until(lambda: _num_mapped() == 0)


async def test_a_source_needs_a_directory_that_is_there(pool: HostPool, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        DescriptorSockets(tmp_path / "missing").start()
