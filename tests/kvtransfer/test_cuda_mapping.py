"""Another process's pool on a GPU: opened once, closed behind the last reader, and never read in the wrong generation."""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.cuda_mapping import Mapping, Mappings, PoolExport
from kvtransfer.cuda_pool import CudaBlocks, CudaPool, GenerationTable
from kvtransfer.errors import HandoverProtocolError, NoTransportError, SourceGoneError, StaleBlockError
from tests.support.fake_cuda import FakeDriver, FakeRuntime
from tests.support.fake_device import FAKE_LAYOUT

_BLOCK_BYTES, _NUM_BLOCKS = FAKE_LAYOUT.block_bytes, 16


class _Two:
    """Prefill's pool and decode's, on one GPU."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.prefill, self.decode = FakeRuntime(self.driver), FakeRuntime(self.driver)
        self.pool, self.own = (CudaPool(runtime, FAKE_LAYOUT, _NUM_BLOCKS, probe=os.urandom(256)) for runtime in (self.prefill, self.decode))
        self.executor = ThreadPoolExecutor(2)
        self.mappings = Mappings(self.decode, self.executor)
        self.export = PoolExport.of(self.pool)
        for block in range(_NUM_BLOCKS):
            self.prefill.copy_from_host(self.pool.address + block * _BLOCK_BYTES, bytes([block + 1]) * _BLOCK_BYTES)
        self.pool.generations.numbers[3] = 7

    def open(self) -> Mapping:
        return self.mappings.open(self.export, self.pool.generations.fd)

    def gather(self, mapping: Mapping, ids: tuple[int, ...] = (3,), generations: tuple[int, ...] = (7,), to: tuple[int, ...] = (5,)) -> None:
        mapping.gather(ids, generations, self.own.memory, to, threading.Event())

    def closed(self) -> bool:
        """Whether nothing is open once the closing thread is through."""
        self.executor.shutdown()
        return (len(self.mappings), self.decode.num_open, self.decode.num_streams) == (0, 0, 0)


@pytest.fixture
def two() -> Iterator[_Two]:
    two = _Two()
    yield two
    two.decode.run(100)
    two.executor.shutdown()
    two.pool.close()
    two.own.close()


def _arrived(two: _Two, block: int = 5) -> bytes:
    return two.decode.copy_to_host(two.own.address + block * _BLOCK_BYTES, _BLOCK_BYTES)


def _waiting(two: _Two, work: Callable[[], None]) -> Future[None]:
    """Runs work in a thread until its kernel waits on the device."""
    two.decode.late = True
    future = two.executor.submit(work)
    while not two.decode.num_launched:
        assert not future.done(), future.exception()
    return future


def test_a_pool_is_opened_once_for_all_pairings_and_closed_with_the_last(two: _Two) -> None:
    first, second = two.open(), two.open()
    assert first is second and two.decode.num_opened == 1
    two.mappings.give_back(first)
    two.gather(second)
    assert _arrived(two) == bytes([4]) * _BLOCK_BYTES
    two.mappings.give_back(second)
    assert two.closed()


def test_a_pool_that_was_closed_is_opened_anew(two: _Two) -> None:
    two.mappings.give_back(two.open())
    two.executor.submit(lambda: None).result(5)
    while two.decode.num_open:
        pass
    two.gather(again := two.open())
    assert two.decode.num_opened == 2
    two.mappings.give_back(again)
    assert two.closed()


def test_a_pairing_that_comes_before_the_closing_keeps_the_pool_open(two: _Two) -> None:
    blocked = threading.Event()
    two.mappings = Mappings(two.decode, executor := ThreadPoolExecutor(1))
    executor.submit(blocked.wait, 20)
    two.mappings.give_back(two.open())
    again = two.open()
    blocked.set()
    executor.shutdown()
    two.gather(again)
    assert (two.decode.num_opened, two.decode.num_open) == (1, 1)
    two.mappings.give_back(again)  # with no thread left to close in
    assert two.closed()


def test_the_last_reader_closes_and_nobody_before(two: _Two) -> None:
    mapping = two.open()
    two.mappings.use(mapping)
    reading = _waiting(two, lambda: two.gather(mapping))
    two.mappings.give_back(mapping)  # the pairing's end, in the middle of a kernel
    two.executor.submit(lambda: None).result(5)
    assert two.decode.num_open == 1
    two.decode.run()
    reading.result(5)
    two.mappings.give_back(mapping)
    assert two.closed()


def test_a_dead_exporters_memory_is_back_once_the_pairing_has_ended(two: _Two) -> None:
    free = two.driver.free_bytes()
    mapping = two.open()
    two.prefill.kill()
    assert two.driver.free_bytes() == free
    two.gather(mapping)  # no unmap under a reader, no other bytes either
    assert _arrived(two) == bytes([4]) * _BLOCK_BYTES
    two.mappings.give_back(mapping)
    assert two.closed()
    assert two.driver.free_bytes() == free + two.pool.num_bytes


@pytest.mark.parametrize("generation", [5, 8, 9, 7 + (1 << 31)])
def test_a_block_of_another_generation_is_not_read(two: _Two, generation: int) -> None:
    mapping = two.open()
    two.pool.generations.numbers[3] = generation
    with pytest.raises(StaleBlockError, match=r"the first is block 3 "):
        two.gather(mapping)
    assert _arrived(two) == bytes(_BLOCK_BYTES)
    two.mappings.give_back(mapping)


def test_a_block_that_is_given_away_while_the_kernel_runs_is_found_behind_it(two: _Two) -> None:
    mapping = two.open()
    reading = _waiting(two, lambda: two.gather(mapping))
    two.pool.generations.numbers[3] += 1
    two.decode.run()
    with pytest.raises(StaleBlockError):
        reading.result(5)
    two.mappings.give_back(mapping)


def test_a_stopped_copy_launches_nothing(two: _Two) -> None:
    mapping, stop = two.open(), threading.Event()
    stop.set()
    with pytest.raises(SourceGoneError, match="stopped"):
        mapping.gather([3], [7], two.own.memory, [5], stop)
    assert _arrived(two) == bytes(_BLOCK_BYTES)
    two.mappings.give_back(mapping)


def test_a_copy_that_fails_on_the_device_is_an_error_and_leaves_nothing(two: _Two) -> None:
    mapping = two.open()
    two.decode.fail_next = "cudaErrorECCUncorrectable"
    with pytest.raises(SourceGoneError, match="cudaErrorECCUncorrectable"):
        two.gather(mapping)
    two.gather(mapping)
    two.mappings.give_back(mapping)
    assert two.closed()


@pytest.mark.parametrize(
    ("ids", "generations", "to"),
    [((3,), (7, 7), (5,)), ((3,), (6,), (5,)), ((16,), (7,), (5,)), ((3, 4), (7,), (5, 6)), ((3,), (7,), (5, 6)), ((3,), (7,), (16,))],
)
def test_a_run_that_does_not_fit_both_pools_is_refused(two: _Two, ids: tuple[int, ...], generations: tuple[int, ...], to: tuple[int, ...]) -> None:
    mapping = two.open()
    with pytest.raises(HandoverProtocolError):
        two.gather(mapping, ids, generations, to)
    two.mappings.give_back(mapping)


def test_the_process_that_made_the_pool_does_not_open_it(two: _Two) -> None:
    with pytest.raises(NoTransportError, match="this process's own"):
        Mappings(two.prefill, two.executor).open(two.export, two.pool.generations.fd)


def test_what_cuda_does_not_open_is_no_transport(two: _Two) -> None:
    with pytest.raises(NoTransportError, match="cudaErrorInvalidResourceHandle"):
        two.mappings.open(replace(two.export, handle="00" * 64, pool_id="another"), two.pool.generations.fd)
    assert len(two.mappings) == 0


def test_a_table_that_can_be_cut_is_not_mapped(two: _Two) -> None:
    table = GenerationTable(_NUM_BLOCKS, seals=0)
    with pytest.raises(HandoverProtocolError, match="can be cut"):
        two.mappings.open(two.export, table.fd)
    table.close()
    short = GenerationTable(_NUM_BLOCKS - 1)
    with pytest.raises(HandoverProtocolError, match="too short"):
        two.mappings.open(two.export, short.fd)
    short.close()
    assert two.decode.num_opened == 0


def test_decode_cannot_write_generations(two: _Two) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(two.pool.generations.fd, 4 * _NUM_BLOCKS, mmap.MAP_SHARED, mmap.PROT_WRITE)


@pytest.mark.parametrize(
    "change",
    [
        {"handle": "zz" * 64},
        {"handle": "00" * 63},
        {"handle": 5},
        {"num_blocks": -1},
        {"num_blocks": 1 << 40},
        {"block_bytes": 0},
        {"block_bytes": 24},
        {"offset": 8},
        {"probe_bytes": 0},
        {"probe_offset": 1 << 60},
        {"num_bytes": 16},
        {"more": 1},
        {"num_blocks": True},
    ],
)
def test_an_export_that_cannot_be_a_pool_is_refused(two: _Two, change: dict[str, object]) -> None:
    fields = json.loads(two.export.pack()) | change
    with pytest.raises(HandoverProtocolError):
        PoolExport.unpack(json.dumps(fields).encode())
    assert PoolExport.unpack(two.export.pack()) == two.export


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b"\xff", b"null", b'"x"'])
def test_what_is_no_export_is_refused(payload: bytes) -> None:
    with pytest.raises(HandoverProtocolError):
        PoolExport.unpack(payload)


def test_an_export_does_not_show_its_handle(two: _Two) -> None:
    assert two.export.handle not in repr(two.export)


def test_a_pool_that_was_exported_keeps_its_memory_and_another_one_gives_it_back(two: _Two) -> None:
    free = two.driver.free_bytes()
    two.pool.close()
    assert two.driver.free_bytes() == free
    two.own.close()
    two.own.close()
    assert two.driver.free_bytes() == free + two.own.num_bytes


def test_a_pools_parts_are_aligned_and_its_probe_is_behind_its_blocks() -> None:
    runtime = FakeRuntime(FakeDriver())
    pool = CudaPool(runtime, FAKE_LAYOUT, 3, probe=bytes(range(256)))
    assert (pool.probe_offset, pool.num_bytes) == (512, 768)
    assert runtime.copy_to_host(pool.address + pool.probe_offset, 256) == bytes(range(256))
    pool.close()


def test_room_for_a_conversion_goes_with_its_last_reference() -> None:
    driver = FakeDriver()
    runtime = FakeRuntime(driver)
    memory = CudaBlocks(runtime, runtime.malloc(1024), 8, 128)
    free = driver.free_bytes()
    room = memory.room(4, 256)
    assert driver.free_bytes() == free - 1024
    room.array[1] = 9
    assert np.frombuffer(runtime.copy_to_host(room.address + 256, 256), np.uint8).tolist() == [9] * 256
    del room
    assert driver.free_bytes() == free
