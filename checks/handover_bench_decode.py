"""Decode's end of hand-overs without an engine: the worker's own pairing, path and hand-over, into a pool of this process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from checks.handover_bench_machine import process_cpu_s
from checks.handover_bench_pool import SyntheticPool, block_content
from checks.handover_bench_source import PrefillProcess
from decode_svc.paired import Paired
from decode_svc.pairing_attempt import PairingAttempt, PairingParts
from kvtransfer.budget import ByteBudget
from kvtransfer.handover import Handover
from kvtransfer.hold import CONFIRMED
from kvtransfer.memories import HostBlocks
from kvtransfer.nixl_settings import NixlSettings
from kvtransfer.path import Destination, PathParts
from kvtransfer.quarantine import Quarantine
from kvtransfer.readers import ReaderParts, make_readers
from rpc.channels import control_channel, data_channel
from tandem.v1 import kv_pb2, prefill_pb2, prefill_pb2_grpc

_TIMEOUT_S = 60.0
_BYTES_PER_PEER, _BYTES_IN_ALL = 64 << 20, 256 << 20
"""What a decode worker allows itself by default."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Hand-overs that ran at the same time: from the first announcement being taken to the last block."""

    num_bytes: int
    elapsed_s: float
    decode_cpu_s: float
    prefill_cpu_s: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second, all hand-overs together."""
        return self.num_bytes / self.elapsed_s / 1e9


@dataclass(frozen=True, slots=True)
class Latency:
    """One hand-over by itself; seconds."""

    whole_s: float
    """From the Prefill RPC's start to the end that confirms it."""
    read_s: float
    """Of this, the reading of the blocks."""


class DecodeEnd:
    """One open pairing by one transport."""

    def __init__(self, paired: Paired, pool: SyntheticPool, prefill: PrefillProcess, control: grpc.aio.Channel, *, checksum: bool) -> None:
        self.paired = paired
        self._pool = pool
        self._prefill = prefill
        self._stub = prefill_pb2_grpc.PrefillServiceStub(control)
        self._checksum = checksum
        self._quarantine = Quarantine()
        self._numbers = itertools.count()

    async def move(self, num_blocks: int, count: int = 1) -> Moved:
        """`count` hand-overs of `num_blocks` each, all announced before the first is read."""
        running = await asyncio.gather(*(self._ask(num_blocks) for _ in range(count)))
        try:
            before, started = self._cpu_s(), time.perf_counter()
            await asyncio.gather(*(one.read() for one in running))
            elapsed_s, after = time.perf_counter() - started, self._cpu_s()
            await asyncio.gather(*(one.confirm() for one in running))
        finally:
            for one in running:
                await self._end(one)
        num_bytes = count * num_blocks * self._pool.kv_cache.layout.block_bytes
        return Moved(num_bytes, elapsed_s, after[0] - before[0], after[1] - before[1])

    async def move_one(self, num_blocks: int = 1) -> Latency:
        """One hand-over, as a decode worker has it."""
        started = time.perf_counter()
        running = await self._ask(num_blocks)
        try:
            await running.read()
            await running.confirm()
            return Latency(time.perf_counter() - started, running.handover.record.wire_ns / 1e9)
        finally:
            await self._end(running)

    async def verify(self, num_blocks: int) -> None:
        """One hand-over into blocks that were wiped before. Raises RuntimeError for one whose bytes are not those of the block that was announced."""
        running = await self._ask(num_blocks)
        self._pool.wipe(running.to.block_table)
        try:
            await running.read()
            await running.confirm()
            for source, own in zip(running.ready.block_ids, running.to.block_table, strict=True):
                found = self._pool.kv_cache.blocks[own]
                if not np.array_equal(found, block_content(source, len(found))):
                    raise RuntimeError(f"{self.paired.path.transport} brought other bytes than those of block {source}")
        finally:
            await self._end(running)

    def _cpu_s(self) -> tuple[float, float]:
        return time.process_time(), process_cpu_s(self._prefill.pid)

    async def _ask(self, num_blocks: int) -> _Running:
        seq_id = f"h{next(self._numbers)}"
        size = self._pool.kv_cache.layout.block_size
        to = Destination(seq_id, self._pool.allocate(seq_id, num_blocks), 0, num_blocks * size)
        running = _Running(self._stub.Prefill(timeout=_TIMEOUT_S), to, Handover(to, self.paired.path, self._pool, self._quarantine))
        start = prefill_pb2.PrefillStart(
            request_id=seq_id,
            pairing_id=self.paired.pairing_id,
            prompt_token_ids=[5] * to.num_tokens,
            transport=self.paired.path.transport,
            checksum=self._checksum,
        )
        try:
            await running.ask(start)
        except BaseException:
            await self._end(running)
            raise
        return running

    async def _end(self, running: _Running) -> None:
        running.call.cancel()
        running.handover.stop()
        await running.handover.stopped()
        self._pool.release(running.to.seq_id)


class _Running:
    """One Prefill RPC and its hand-over."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any], to: Destination, handover: Handover) -> None:
        self.call = call
        self.to = to
        self.handover = handover
        self.ready = kv_pb2.KvReady()

    async def ask(self, start: prefill_pb2.PrefillStart) -> None:
        """Returns when all is announced; nothing is read yet."""
        await self.call.write(prefill_pb2.PrefillRequest(start=start))
        self.ready = (await self._read()).kv_ready
        assert (await self._read()).HasField("done")

    async def read(self) -> None:
        """Returns when all blocks are here."""
        self.handover.announce(self.ready)
        await self.handover.covered()

    async def confirm(self) -> None:
        """Returns when prefill has confirmed and the RPC has ended."""
        copied = prefill_pb2.Copied(hold_id=self.ready.hold_id, num_blocks=self.ready.num_blocks)
        await self.call.write(prefill_pb2.PrefillRequest(copied=copied))
        assert await self.call.read() is grpc.aio.EOF
        assert dict(await self.call.trailing_metadata() or ())[CONFIRMED] == self.ready.hold_id

    async def _read(self) -> prefill_pb2.PrefillResponse:
        response = await self.call.read()
        if response is grpc.aio.EOF:
            raise RuntimeError("prefill ended the conversation")
        assert isinstance(response, prefill_pb2.PrefillResponse)
        return response


@dataclass(frozen=True, slots=True)
class PairWish:
    """How to pair."""

    transport: str
    checksum: bool = False
    socket_dir: Path | None = None
    nixl: NixlSettings = field(default_factory=NixlSettings)


@asynccontextmanager
async def open_end(pool: SyntheticPool, prefill: PrefillProcess, wish: PairWish) -> AsyncIterator[tuple[DecodeEnd, float]]:
    """A pairing by this transport and no other, and the seconds that pairing took. Raises NotPairedError with the reason why there is none."""
    memory, layout = HostBlocks(pool.kv_cache.blocks), pool.kv_cache.layout
    with ThreadPoolExecutor(1, thread_name_prefix="kv-copy") as executor:
        async with control_channel(prefill.address) as control, data_channel(prefill.address) as data:
            path = PathParts(memory, layout, executor, (ByteBudget(_BYTES_PER_PEER), ByteBudget(_BYTES_IN_ALL)), checksum=wish.checksum)
            parts = ReaderParts(memory, executor, control, data, wish.socket_dir, wish.nixl)
            await control.channel_ready()
            started = time.perf_counter()
            pairing = PairingParts("prefill", control, path, lambda names: make_readers(names, parts), (wish.transport,), 0.0)
            paired, _ = await PairingAttempt.of(pairing, (wish.transport,)).run()
            elapsed_s = time.perf_counter() - started
            try:
                yield DecodeEnd(paired, pool, prefill, control, checksum=wish.checksum), elapsed_s
            finally:
                paired.close()
