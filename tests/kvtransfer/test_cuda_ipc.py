"""`cuda_ipc` from offer to close, over real unix sockets; what all transports promise is in the contract suite."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import xxhash

from engine.kv_cache import HostKvCache
from engine.proto import kv_layout_to_proto
from kvtransfer.choice import choose
from kvtransfer.cuda_ipc import CudaIpcReader, CudaIpcSource, mappings_of
from kvtransfer.cuda_mapping import Mappings
from kvtransfer.cuda_pool import CudaPool
from kvtransfer.descriptor_sockets import DescriptorSockets
from kvtransfer.errors import NoTransportError, SourceGoneError
from kvtransfer.hold import Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.memories import HostBlocks
from kvtransfer.pairing import NONCE_BYTES, Pairing, boot_id
from kvtransfer.quarantine import Quarantine
from kvtransfer.readers import ReaderParts, make_readers
from kvtransfer.sources import SourceParts, open_sources
from kvtransfer.transport import Rows
from tandem.v1 import kv_pb2, prefill_pb2
from tests.kvtransfer.ends import until
from tests.support.fake_cuda import FakeDriver, FakeRuntime
from tests.support.fake_device import FAKE_LAYOUT

_NUM_BLOCKS = 16


class _Host:
    """Prefill and decode, each with a GPU."""

    def __init__(self, driver: FakeDriver, directory: Path, gpus: tuple[str, str]) -> None:
        self.directory = directory
        self.prefill, self.decode = FakeRuntime(driver, gpus[0]), FakeRuntime(driver, gpus[1])
        self.pool, self.own = (CudaPool(runtime, FAKE_LAYOUT, _NUM_BLOCKS, probe=os.urandom(4096)) for runtime in (self.prefill, self.decode))
        self.executor = ThreadPoolExecutor(2)
        self.mappings = Mappings(self.decode, self.executor)
        self.sockets = DescriptorSockets(directory)
        self.source = CudaIpcSource(self.pool, self.sockets)

    def reader(self) -> CudaIpcReader:
        return CudaIpcReader(self.own.memory, self.mappings, self.executor, self.directory)

    async def offer(self, reader: CudaIpcReader, **changes: object) -> prefill_pb2.PairResponse:
        start = prefill_pb2.PairStart(layout=kv_layout_to_proto(FAKE_LAYOUT), boot_id=boot_id(), nonce=secrets.token_bytes(NONCE_BYTES))
        reader.greet(start)
        for name, value in changes.items():
            setattr(start, name, value)
        pairing = Pairing(start)
        return prefill_pb2.PairResponse(
            pairing_id=pairing.pairing_id,
            layout=kv_layout_to_proto(FAKE_LAYOUT),
            nonce=pairing.nonce,
            num_blocks=_NUM_BLOCKS,
            probe_bytes=len(self.pool.probe),
            probe_digest=xxhash.xxh3_64_intdigest(self.pool.probe),
            sources=[await self.source.offer(pairing)],
        )

    def ready(self) -> kv_pb2.KvReady:
        self.pool.generations.numbers[2] = 1
        return kv_pb2.KvReady(hold_id="h", num_blocks=1, block_ids=[2], generations=[1])


@asynccontextmanager
async def _host(directory: Path, gpus: tuple[str, str] = ("gpu-0", "gpu-0"), peers: frozenset[frozenset[str]] = frozenset()) -> AsyncIterator[_Host]:
    host = _Host(FakeDriver(peers=peers), directory, gpus)
    host.sockets.start()
    try:
        yield host
    finally:
        await host.sockets.close()
        host.decode.run(10)
        host.executor.shutdown()
        host.pool.close()
        host.own.close()


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[_Host]:
    async with _host(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("gpus", [("gpu-0", "gpu-0"), ("gpu-0", "gpu-1")])
async def test_a_pairing_is_chosen_with_what_its_probe_moved_and_reads(tmp_path: Path, gpus: tuple[str, str]) -> None:
    async with _host(tmp_path, gpus, frozenset({frozenset({"gpu-0", "gpu-1"})})) as host:
        reader = host.reader()
        chosen = await choose(await host.offer(reader), [reader], min_bytes_per_s=1.0)
        assert chosen.reader is reader and chosen.bytes_per_s > 0
        host.prefill.copy_from_host(host.pool.address + 2 * 128, b"\7" * 128)
        await reader.read(host.ready(), Rows(host.own.memory, [9]))
        assert host.decode.copy_to_host(host.own.address + 9 * 128, 128) == b"\7" * 128
        reader.close()
        host.executor.shutdown()
        assert (len(host.mappings), host.decode.num_open) == (0, 0)


async def test_without_peer_access_there_is_no_offer_and_the_reason_names_the_way_round(tmp_path: Path) -> None:
    async with _host(tmp_path, ("gpu-0", "gpu-1")) as host:
        with pytest.raises(NoTransportError, match=r"gpu-1 has no peer access to gpu-0.*through host memory, by the next transport"):
            await host.offer(host.reader())


@pytest.mark.parametrize(("changes", "reason"), [({"boot_id": "other"}, "another host"), ({"device_uuid": ""}, "decode's pool is in host memory")])
async def test_others_are_refused_with_the_reason(host: _Host, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(NoTransportError, match=reason):
        await host.offer(host.reader(), **changes)


async def test_a_reader_of_host_memory_is_refused_with_the_reason(host: _Host) -> None:
    memory = HostBlocks(np.zeros((4, 128), np.uint8))
    with pytest.raises(NoTransportError, match="host memory"):
        CudaIpcReader(memory, host.mappings, host.executor, host.directory)
    with pytest.raises(NoTransportError, match="host memory"):
        mappings_of(memory, host.executor)


def test_readers_of_one_process_share_what_is_open() -> None:
    runtime, executor = FakeRuntime(FakeDriver()), ThreadPoolExecutor(1)
    pool = CudaPool(runtime, FAKE_LAYOUT, 4, probe=bytes(256))
    assert mappings_of(pool.memory, executor) is mappings_of(pool.memory, executor)
    pool.close()


async def test_two_pairings_open_the_pool_once(host: _Host) -> None:
    readers = [host.reader(), host.reader()]
    for reader in readers:
        offer = await host.offer(reader)
        await reader.attach(offer, offer.sources[0])
    assert host.decode.num_opened == 1
    readers[0].close()
    readers[0].close()
    assert len((await readers[1].probe()).content) == 4096
    with pytest.raises(SourceGoneError):
        await readers[0].read(host.ready(), Rows(host.own.memory, [0]))
    readers[1].close()


async def test_a_handle_is_fetched_once_and_not_after_the_pairings_end(host: _Host) -> None:
    reader, again, late = host.reader(), host.reader(), host.reader()
    offer = await host.offer(reader)
    again.greet(prefill_pb2.PairStart(nonce=b""))
    again._nonce = reader._nonce
    await reader.attach(offer, offer.sources[0])
    with pytest.raises(NoTransportError):
        await again.attach(offer, offer.sources[0])
    offer = await host.offer(late)
    host.source.withdraw(offer.pairing_id)
    host.source.withdraw(offer.pairing_id)
    with pytest.raises(NoTransportError):
        await late.attach(offer, offer.sources[0])
    reader.close()
    host.executor.shutdown()
    assert len(host.mappings) == 0


async def test_a_reader_that_is_closed_while_it_attaches_keeps_nothing_open(host: _Host) -> None:
    reader = host.reader()
    offer = await host.offer(reader)
    opening = asyncio.Event()
    loop, open_handle = asyncio.get_running_loop(), host.decode.ipc_open

    def slow_open(handle: bytes) -> int:
        loop.call_soon_threadsafe(opening.set)
        return open_handle(handle)

    host.decode.ipc_open = slow_open  # type: ignore[method-assign]
    attaching = asyncio.create_task(reader.attach(offer, offer.sources[0]))
    await asyncio.wait_for(opening.wait(), 5)
    reader.close()
    with contextlib.suppress(SourceGoneError):
        await attaching
    with pytest.raises(SourceGoneError):
        await reader.probe()
    host.executor.shutdown()
    assert (len(host.mappings), host.decode.num_open) == (0, 0)


async def test_a_cancelled_attach_keeps_nothing_open_once_the_reader_is_closed(host: _Host) -> None:
    reader = host.reader()
    offer = await host.offer(reader)
    attaching = asyncio.create_task(reader.attach(offer, offer.sources[0]))
    await asyncio.sleep(0)
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    reader.close()
    host.executor.shutdown()
    assert (len(host.mappings), host.decode.num_open) == (0, 0)


async def test_a_cancelled_read_returns_only_when_its_kernel_has_ended(host: _Host) -> None:
    reader = host.reader()
    offer = await host.offer(reader)
    await reader.attach(offer, offer.sources[0])
    host.decode.late = True
    reading = asyncio.create_task(reader.read(host.ready(), Rows(host.own.memory, [3])))
    await until(lambda: host.decode.num_launched == 1)
    reading.cancel()
    reader.close()
    done, _ = await asyncio.wait({reading}, timeout=0.05)
    assert not done and host.decode.num_open == 1
    host.decode.run()
    with pytest.raises(asyncio.CancelledError):
        await reading
    host.executor.shutdown()
    assert (len(host.mappings), host.decode.num_open) == (0, 0)


async def test_the_event_loop_runs_while_a_kernel_does(host: _Host) -> None:
    reader = host.reader()
    offer = await host.offer(reader)
    await reader.attach(offer, offer.sources[0])
    host.decode.late = True
    reading = asyncio.create_task(reader.read(host.ready(), Rows(host.own.memory, [3])))
    await until(lambda: host.decode.num_launched == 1)
    assert not reading.done()
    host.decode.run()
    await asyncio.wait_for(reading, 5)
    reader.close()


async def test_the_probes_landing_is_given_back(host: _Host) -> None:
    reader = host.reader()
    offer = await host.offer(reader)
    await reader.attach(offer, offer.sources[0])
    free = host.decode._driver.free_bytes()
    assert bytes((await reader.probe()).content) == host.pool.probe
    host.decode.fail_next = "cudaErrorLaunchFailure"
    with pytest.raises(SourceGoneError):
        await reader.probe()
    assert host.decode._driver.free_bytes() == free
    reader.close()


async def test_no_handle_and_no_nonce_is_logged(host: _Host, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    reader = host.reader()
    offer = await host.offer(reader)
    handle = host.prefill.ipc_get_handle(host.pool.address)
    await reader.attach(offer, offer.sources[0])
    await reader.probe()
    reader.close()
    for secret in (handle, offer.nonce):
        assert secret.hex() not in caplog.text and repr(secret) not in caplog.text
    assert handle.hex() not in str(offer) and handle not in offer.SerializeToString()


async def test_a_pool_in_host_memory_is_neither_offered_nor_read_into_and_the_reason_is_kept(tmp_path: Path, host: _Host) -> None:
    cache = HostKvCache(FAKE_LAYOUT, 4, probe_bytes=256)
    holds = Holds(_NoReferences(), Quarantine())
    async with open_sources(SourceParts(HostPool(cache), holds, tmp_path), ["cuda_ipc"]) as sources:
        assert (sources.by_name, sources.missing) == ({}, {"cuda_ipc": "prefill's pool is in host memory"})
    async with open_sources(SourceParts(HostPool(cache), holds, tmp_path, host.pool), ["cuda_ipc"]) as sources:
        assert isinstance(sources.by_name["cuda_ipc"], CudaIpcSource)
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        for pool, usable in ((HostBlocks(cache.blocks), 0), (host.own.memory, 1)):
            readers = make_readers(["cuda_ipc"], ReaderParts(pool, host.executor, channel, channel, tmp_path))
            assert len(readers.usable) == usable
            assert usable or "host memory" in readers.unusable["cuda_ipc"]
    cache.close()


class _NoReferences:
    async def acquire(self, reader_id: str, seq_id: str, first_block: int, num_blocks: int) -> tuple[int, ...]:
        return ()

    def drop(self, reader_id: str) -> None:
        pass
