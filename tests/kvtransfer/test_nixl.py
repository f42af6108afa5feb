"""`nixl`: what goes wrong between two processes and what it costs to be paired. The contract suite has the rest."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from engine.kv_cache import populate
from kvtransfer import nixl_push, nixl_staging
from kvtransfer.errors import DigestError, HandoverError, HandoverProtocolError, NoTransportError, SourceGoneError, StalledError, TransferError
from kvtransfer.nixl_agent import MAX_DESCRIPTORS, NixlAgent
from kvtransfer.nixl_pieces import Region, Row, matching, one_piece
from kvtransfer.nixl_settings import Direction, NixlSettings, load_nixl
from kvtransfer.nixl_staging import NUM_SLOTS, NixlStaging
from kvtransfer.transport import Rows
from tandem.v1 import kv_pb2, prefill_pb2
from tests.kvtransfer.ends_nixl import MISSING, TLS, ucx_tls
from tests.kvtransfer.nixl_peer import LAYOUT, NUM_BLOCKS, Decode, Prefill, paired

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
_BOTH: list[Direction] = ["read", "write"]


def _settings(direction: Direction) -> NixlSettings:
    return NixlSettings("lo", direction=direction)


@pytest.fixture
def tcp() -> Iterator[None]:
    with ucx_tls("tcp"):
        yield


@contextmanager
def _process(role: str, direction: Direction, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.kvtransfer.nixl_peer", role, direction, *arguments]
    with ucx_tls(TLS[direction]):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


@contextmanager
def _prefill_process(direction: Direction) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with _process("prefill", direction) as process, ucx_tls(TLS[direction]):
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


async def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, process.stdout.readline), 30)


async def _until_it_has_begun(decode: Decode) -> None:
    """The first block has arrived."""
    async with asyncio.timeout(20):
        while not decode.blocks.array[0].any():  # noqa: ASYNC110 # nothing announces it
            await asyncio.sleep(0)


@asynccontextmanager
async def _serving(direction: Direction, **parts: Any) -> AsyncIterator[Prefill]:
    with ucx_tls(TLS[direction]):
        async with Prefill(_settings(direction), **parts).serving() as prefill:
            yield prefill


def _expected() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What prefill's hold has, in its order."""
    words = np.random.default_rng(1).integers(1, 1 << 60, NUM_BLOCKS * LAYOUT.block_bytes // 8, np.uint64)
    return words.view(np.uint8).reshape(NUM_BLOCKS, -1)[::-1]


@pytest.mark.parametrize("direction", _BOTH)
async def test_the_right_bytes_cross_between_two_processes(direction: Direction) -> None:
    with _prefill_process(direction) as (_, port):
        async with paired(port, _settings(direction)) as decode:
            assert decode.reader.direction == direction
            await decode.read()
            assert (decode.blocks.array == _expected()).all()


@pytest.mark.parametrize("direction", _BOTH)
async def test_prefills_death_in_the_middle_is_an_error_at_once(direction: Direction) -> None:
    with _prefill_process(direction) as (process, port):
        async with paired(port, _settings(direction)) as decode, decode.hold() as ready:
            reads = [asyncio.create_task(decode.reader.read(ready, Rows(decode.blocks, range(NUM_BLOCKS)))) for _ in range(4)]
            await _until_it_has_begun(decode)
            process.kill()
            outcomes = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), 15)
            assert any(isinstance(outcome, TransferError) for outcome in outcomes)
            with pytest.raises(TransferError):
                await asyncio.wait_for(decode.reader.read(ready, Rows(decode.blocks, range(NUM_BLOCKS))), 15)
            assert decode.reader.lost


@pytest.mark.parametrize("direction", _BOTH)
async def test_decodes_death_in_the_middle_leaves_prefill_serving_and_no_reader(direction: Direction) -> None:
    async with _serving(direction) as prefill:
        for _ in range(3):
            with _process("decode", direction, str(prefill.port)) as process:
                assert await _line(process) == "read\n"
                process.kill()
                async with asyncio.timeout(20):
                    while len(prefill.holds) or prefill.source.num_agents or prefill.quarantine.reader_ids:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
        assert prefill.references.dropped
        async with paired(prefill.port, _settings(direction)) as decode:
            await decode.read()
            assert (decode.blocks.array == _expected()).all()


async def test_a_cancelled_write_keeps_its_slot_until_prefill_has_stopped() -> None:
    async with _serving("write") as prefill, paired(prefill.port, _settings("write")) as decode, decode.hold() as ready:
        gate, write = asyncio.Event(), prefill.source.write

        async def gated(request: prefill_pb2.WriteKvRequest, pairing: Any) -> prefill_pb2.WriteKvResponse:
            await gate.wait()
            return await write(request, pairing)

        prefill.source.write = gated  # type: ignore[method-assign]
        reading = asyncio.create_task(decode.reader.read(ready, Rows(decode.blocks, range(NUM_BLOCKS))))
        async with asyncio.timeout(10):
            while prefill.num_writes < 2 + NUM_SLOTS:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        staging = _staging(decode)
        assert staging.num_free == 0
        assert not decode.blocks.array.any()
        gate.set()
        async with asyncio.timeout(10):
            while staging.num_free < NUM_SLOTS:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        assert not decode.reader.lost
        await decode.read()
        assert (decode.blocks.array == _expected()).all()


async def test_a_frozen_prefill_costs_the_region_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_push, "MAX_ABANDONED_S", 0.3)
    with _prefill_process("write") as (process, port):
        async with paired(port, _settings("write")) as decode, decode.hold() as ready:
            staging = _staging(decode)
            os.kill(process.pid, signal.SIGSTOP)
            reading = asyncio.create_task(decode.reader.read(ready, Rows(decode.blocks, range(NUM_BLOCKS))))
            async with asyncio.timeout(10):
                while staging.num_free:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(reading, 1)
            assert staging.num_free == 0
            assert not decode.reader.lost
            await asyncio.wait_for(asyncio.wrap_future(staging.agent.ended), 10)
            with pytest.raises(SourceGoneError, match="did not"):
                await decode.reader.read(ready, Rows(decode.blocks, range(NUM_BLOCKS)))
            os.kill(process.pid, signal.SIGCONT)


@pytest.mark.parametrize("field", ["grant", "slot"])
async def test_an_answer_for_a_foreign_grant_or_slot_is_refused_and_costs_the_region(field: str) -> None:
    def lie(response: prefill_pb2.WriteKvResponse, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        context.set_trailing_metadata((("tandem-stopped", "1"),))
        setattr(response, field, getattr(response, field) ^ 1)

    async with _serving("write") as prefill, paired(prefill.port, _settings("write")) as decode:
        prefill.answer = lie
        with pytest.raises(HandoverProtocolError, match="another grant"):
            await decode.read()
        assert decode.reader.lost
        with pytest.raises(SourceGoneError):
            await decode.read()


async def test_an_end_that_does_not_say_stopped_costs_the_region() -> None:
    async with _serving("write") as prefill, paired(prefill.port, _settings("write")) as decode:
        prefill.answer = lambda *_: None
        with contextlib.suppress(HandoverError):  # what was written by then is right, and digests say so
            await decode.read()
        assert "stopped" in decode.reader.lost
        await asyncio.wait_for(asyncio.wrap_future(_staging(decode).agent.ended), 10)
        with pytest.raises(SourceGoneError):
            await decode.read()


@pytest.mark.parametrize("fault", ["wrong", "missing", "too many"])
async def test_a_digest_that_is_not_of_what_has_landed_is_an_error(fault: str) -> None:
    def lie(response: prefill_pb2.WriteKvResponse, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        context.set_trailing_metadata((("tandem-stopped", "1"),))
        if fault == "wrong":
            response.digests[-1] ^= 1
        elif fault == "missing":
            response.digests.pop()
        else:
            response.digests.append(0)

    async with _serving("write") as prefill, paired(prefill.port, _settings("write")) as decode:
        prefill.answer = lie
        with pytest.raises(DigestError):
            await decode.read()
        assert not decode.reader.lost
        prefill.answer = Prefill.answer
        await decode.read()


async def test_prefill_writes_only_within_the_slots_and_once_at_a_time() -> None:
    async with _serving("write") as prefill, paired(prefill.port, _settings("write")) as decode, decode.hold() as ready:
        pairing = prefill.pairings[decode.offer.pairing_id]
        request = prefill_pb2.WriteKvRequest(pairing_id=pairing.pairing_id, hold_id=ready.hold_id, num_blocks=1, slot=NUM_SLOTS)
        with pytest.raises(HandoverProtocolError, match="slot"):
            await prefill.source.write(request, pairing)
        request.slot, request.num_blocks = 0, NUM_BLOCKS
        with pytest.raises(HandoverProtocolError, match="bytes"):
            await prefill.source.write(request, pairing)
        request.num_blocks = 1
        with _staging(decode).agent.attending():
            both = await asyncio.gather(*(prefill.source.write(request, pairing) for _ in range(2)), return_exceptions=True)
        assert [type(one) for one in both] == [prefill_pb2.WriteKvResponse, HandoverProtocolError]
        pairing.start.nixl_staging.base_address += 1  # the last slot ends outside of what decode has registered
        request.slot = NUM_SLOTS - 1
        request.num_blocks = _staging(decode).slot_bytes // LAYOUT.block_bytes
        with pytest.raises(HandoverProtocolError, match="refused the memory"):
            await prefill.source.write(request, pairing)


async def test_over_tcp_prefill_offers_no_read_and_a_read_fails_at_once(tcp: None) -> None:
    async with Prefill(_settings("auto")).serving() as prefill:
        async with paired(prefill.port, _settings("auto")) as decode:
            assert not decode.offer.sources[0].nixl.agent_metadata
            assert decode.reader.direction == "write"
        with pytest.raises(NoTransportError, match="no lane to read by"):
            async with paired(prefill.port, _settings("read")):
                pass
    nixl, own, remote = load_nixl(_settings("read")), np.zeros(1 << 20, np.uint8), np.ones(1 << 20, np.uint8)
    reader, target = NixlAgent(nixl, [Region.of(own)]), NixlAgent(nixl, [Region.of(remote)])
    with target.attending():
        peer = await reader.connect(await target.metadata())
        with pytest.raises(SourceGoneError):
            await asyncio.wait_for(reader.transfer("READ", peer, one_piece(own.ctypes.data, 1 << 20), one_piece(remote.ctypes.data, 1 << 20)), 10)
    assert not own.any()
    target.close()
    for agent in (reader, target):
        await asyncio.wait_for(asyncio.wrap_future(agent.ended), 10)


async def test_auto_takes_the_faster_direction_and_ends_the_other_ones_agent() -> None:
    with ucx_tls("tcp,cma"):
        async with Prefill(_settings("auto")).serving() as prefill, paired(prefill.port, _settings("auto")) as decode:
            assert decode.offer.sources[0].nixl.agent_metadata
            assert decode.offer.sources[0].nixl.writes
            assert decode.reader.direction in _BOTH
            staging = decode.reader._staging
            assert staging is not None
            assert bool(staging.lost) == (decode.reader.direction == "read")
            await decode.read()
            assert (decode.blocks.array == _expected()).all()


async def test_a_transfer_that_stalls_ends_its_agent_and_only_then_itself(tcp: None) -> None:
    nixl, own, remote = load_nixl(_settings("write")), np.ones(64 << 20, np.uint8), np.zeros(64 << 20, np.uint8)
    writer, target = NixlAgent(nixl, [Region.of(own)], max_transfer_s=0.3), NixlAgent(nixl, [Region.of(remote)])
    peer = await writer.connect(await target.metadata())
    with pytest.raises(StalledError):  # nobody makes progress at the target
        await writer.transfer("WRITE", peer, one_piece(own.ctypes.data, own.nbytes), one_piece(remote.ctypes.data, own.nbytes))
    assert writer.ended.done()
    assert "0.3 s" in writer.lost
    with pytest.raises(SourceGoneError):
        await writer.transfer("WRITE", peer, one_piece(own.ctypes.data, 1), one_piece(remote.ctypes.data, 1))
    target.close()
    await asyncio.wait_for(asyncio.wrap_future(target.ended), 10)


async def test_a_cancelled_transfer_is_over_when_its_caller_is(tcp: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.nixl_agent.MAX_STOP_S", 0.2)
    nixl, own, remote = load_nixl(_settings("write")), np.ones(64 << 20, np.uint8), np.zeros(64 << 20, np.uint8)
    writer, target = NixlAgent(nixl, [Region.of(own)]), NixlAgent(nixl, [Region.of(remote)])
    peer = await writer.connect(await target.metadata())
    transfer = asyncio.create_task(writer.transfer("WRITE", peer, one_piece(own.ctypes.data, own.nbytes), one_piece(remote.ctypes.data, own.nbytes)))
    await asyncio.sleep(0)  # it is posted
    transfer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(transfer, 10)
    assert writer.ended.done()
    target.close()
    await asyncio.wait_for(asyncio.wrap_future(target.ended), 10)


class _Counting:
    """NIXL's module, whose agents note how many descriptors each list has."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self.counts: list[int] = []

    def nixl_agent_config(self, **options: Any) -> Any:
        return self._nixl.nixl_agent_config(**options)

    def nixl_agent(self, name: str, config: Any) -> Any:
        agent = self._nixl.nixl_agent(name, config)
        make = agent.get_xfer_descs

        def counting(pieces: Any, kind: str) -> Any:
            self.counts.append(len(pieces))
            return make(pieces, kind)

        agent.get_xfer_descs = counting
        return agent


async def test_a_long_transfer_is_posted_in_bounded_parts_and_arrives_whole(tcp: None) -> None:
    nixl = _Counting(load_nixl(_settings("write")))
    own, remote = np.random.default_rng(2).integers(0, 255, (2000, 64), np.uint8), np.zeros((2000, 64), np.uint8)
    writer, target = NixlAgent(nixl, [Region.of(own)]), NixlAgent(nixl, [Region.of(remote)])
    with target.attending():
        peer = await writer.connect(await target.metadata())
        pieces = matching(Row(own.ctypes.data, 64), range(2000), Row(remote.ctypes.data, 64), range(1999, -1, -1))
        await writer.transfer("WRITE", peer, *pieces)
    assert (own[::-1] == remote).all()
    assert max(nixl.counts) <= MAX_DESCRIPTORS
    assert sum(nixl.counts) == 2 * 2000
    for agent in (writer, target):
        agent.close()
        await asyncio.wait_for(asyncio.wrap_future(agent.ended), 10)


def test_neighbours_on_both_sides_are_one_piece() -> None:
    own, remote = matching(Row(1000, 10), [0, 1, 2, 5, 6, 9], Row(5000, 10), [7, 8, 9, 3, 5, 6])
    assert own.tolist() == [[1000, 30], [1050, 10], [1060, 10], [1090, 10]]
    assert remote.tolist() == [[5070, 30], [5030, 10], [5050, 10], [5060, 10]]


@pytest.mark.parametrize("direction", _BOTH)
async def test_a_paired_process_that_moves_nothing_needs_hardly_any_time(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.nixl_source.GREETING_S", 0.0)
    async with _serving(direction) as prefill, paired(prefill.port, _settings(direction)) as decode:
        await decode.read()
        gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.sleep(2)
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.2  # of both ends, a tenth of a core; one that spins takes two seconds
        await decode.read()


def _held_by_process() -> tuple[int, int, int]:
    """Descriptors, threads, resident bytes."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * resource.getpagesize()


async def test_a_hundred_pairings_leave_nothing_behind() -> None:
    with ucx_tls("tcp,cma"):
        async with Prefill(_settings("auto")).serving() as prefill:

            async def once() -> None:
                async with paired(prefill.port, _settings("auto")) as decode, decode.hold() as ready:
                    one = kv_pb2.KvReady(hold_id=ready.hold_id, num_blocks=1, block_ids=ready.block_ids[:1], generations=ready.generations[:1])
                    await decode.reader.read(one, Rows(decode.blocks, [0]))

            await asyncio.gather(*(once() for _ in range(4)))
            await _agents_have_ended(prefill)
            before = _held_by_process()
            for _ in range(25):
                await asyncio.gather(*(once() for _ in range(4)))
            await _agents_have_ended(prefill)
            after = _held_by_process()
            assert after[0] <= before[0] + 4
            assert after[1] <= before[1] + 2
            assert after[2] <= before[2] + (48 << 20)


async def _agents_have_ended(prefill: Prefill) -> None:
    async with asyncio.timeout(20):
        while prefill.source.num_agents or any("nixl" in name for name in _thread_names()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "nixl"]


async def test_a_staging_region_gets_its_memory_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def populate_there(memory: mmap.mmap) -> None:
        threads.append(threading.current_thread())
        populate(memory)

    monkeypatch.setattr(nixl_staging, "populate", populate_there)
    staging = NixlStaging(load_nixl(_settings("write")))
    try:
        await staging.agent.metadata()
        assert [thread.name for thread in threads] == ["nixl"]
    finally:
        staging.close()
        await asyncio.wrap_future(staging.agent.ended)


def test_without_devices_or_without_the_package_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with pytest.raises(NoTransportError, match="nixl_net_devices is not set"):
        load_nixl(NixlSettings())
    monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name, name="nixl_cu13")))
    with pytest.raises(NoTransportError, match="not installed"):
        load_nixl(NixlSettings("lo"))


async def test_metadata_is_in_no_representation_and_garbage_is_refused(tcp: None) -> None:
    nixl = load_nixl(_settings("write"))
    staging = NixlStaging(nixl, num_slots=1, slot_bytes=4096)
    secret = staging.describe(10).agent_metadata
    slot = await staging.take()
    assert str(slot.grant) not in repr(slot)
    assert str(secret) not in repr(staging.agent)
    for garbage in (b"", b"garbage", secret[: len(secret) // 2], secret[1:]):
        with pytest.raises(HandoverProtocolError):
            await staging.agent.connect(garbage)
    staging.close()
    await asyncio.wait_for(asyncio.wrap_future(staging.agent.ended), 10)


async def test_an_agent_that_cannot_be_made_is_no_transport(monkeypatch: pytest.MonkeyPatch, tcp: None) -> None:
    nixl = load_nixl(_settings("write"))
    monkeypatch.setenv("UCX_NET_DEVICES", "no-such-device")
    staging = NixlStaging(nixl)
    with pytest.raises(NoTransportError):
        staging.describe(10)
    with pytest.raises(SourceGoneError):
        await staging.take()


def _staging(decode: Decode) -> NixlStaging:
    staging = decode.reader._staging
    assert staging is not None
    return staging


async def test_slots_are_granted_in_turn_and_a_waiter_that_leaves_loses_none(tcp: None) -> None:
    staging = NixlStaging(load_nixl(_settings("write")), num_slots=1, slot_bytes=4096)
    first = await staging.take()
    leaving, waiting = asyncio.create_task(staging.take()), asyncio.create_task(staging.take())
    await asyncio.sleep(0)
    leaving.cancel()
    staging.give(first)
    second = await waiting
    assert (second.index, second.grant != first.grant) == (0, True)
    waiting = asyncio.create_task(staging.take())
    await asyncio.sleep(0)
    staging.give(second)
    waiting.cancel()  # after the slot was granted to it
    with contextlib.suppress(asyncio.CancelledError):
        staging.give(await waiting)
    assert staging.num_free == 1
    last = await staging.take()
    waiting = asyncio.create_task(staging.take())
    await asyncio.sleep(0)
    staging.burn("for a test")
    with pytest.raises(SourceGoneError, match="for a test"):
        await waiting
    del last
    await asyncio.wait_for(asyncio.wrap_future(staging.agent.ended), 10)
