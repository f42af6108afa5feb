"""Transport `nixl`, prefill's side: for each pairing an agent with the pool, which decode reads from, or which writes into decode's staging region."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtransfer.copying import run_to_its_end
from kvtransfer.errors import HandoverProtocolError, NoTransportError, SourceGoneError
from kvtransfer.hold import Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.nixl_pieces import Region, Row, matching, one_piece
from kvtransfer.nixl_settings import NixlSettings, load_nixl
from kvtransfer.pairing import Pairing, boot_id
from tandem.v1 import kv_pb2, prefill_pb2

READ_TICK_S = 0.05
"""How often an agent that is read from makes progress: connections need it, reads do not."""
GREETING_S = 15.0
"""Time after an offer in which the peer connects and probes."""
_MAX_AT_ONCE = 2


@dataclass(slots=True)
class _End:
    """This side of one pairing."""

    agent: NixlAgent
    peer: str = ""
    """Name of decode's staging agent; empty: there is none to write to."""
    busy_slots: set[int] = field(default_factory=set)
    turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_AT_ONCE))
    """Slots are filled one behind the other, or decode would have to wait for all of them and then empty all of them."""


class NixlSource:
    """Made once per process, and closed once. `executor` digests what is written."""

    name = "nixl"

    def __init__(self, pool: HostPool, holds: Holds, executor: Executor, settings: NixlSettings) -> None:
        """Raises NoTransportError when NIXL cannot be used here."""
        self._nixl: Any = load_nixl(settings)
        self._pool = pool
        self._holds = holds
        self._executor = executor
        self._settings = settings
        self._ends: dict[str, _End] = {}
        memory = np.frombuffer(pool.kv_cache.memory, np.uint8)
        self._region = Region.of(memory)

    @property
    def one_sided(self) -> bool:
        """See KvSource: as long as reading is an option."""
        return self._settings.direction != "write"

    @property
    def num_agents(self) -> int:
        """Agents that are open, one per pairing."""
        return len(self._ends)

    async def offer(self, pairing: Pairing) -> kv_pb2.KvSource:
        """See KvSource. The agent's metadata is offered only where one-sided reads are possible: who has it can write to the pool, too."""
        staging = pairing.start.nixl_staging
        reads = self._settings.direction != "write" and self._settings.can_read(same_host=pairing.start.boot_id == boot_id())
        writes = self._settings.direction != "read" and bool(staging.agent_metadata)
        if not reads and not writes:
            raise NoTransportError(f"there is no lane to read by, and decode has no staging region ({self._settings.lane})")
        end = _End(NixlAgent(self._nixl, [self._region], tick_s=READ_TICK_S if reads else None))
        self._ends[pairing.pairing_id] = end
        try:
            metadata = await end.agent.metadata()
            if writes:
                end.peer = await end.agent.connect(staging.agent_metadata)
        except BaseException:
            self.withdraw(pairing.pairing_id)
            raise
        if reads:
            end.agent.attend_for(GREETING_S)
        cache, base = self._pool.kv_cache, self._region.address
        return kv_pb2.KvSource(
            nixl=kv_pb2.NixlSource(
                agent_metadata=metadata if reads else b"",
                base_address=base,
                probe_address=base + cache.probe_offset,
                generations_address=base + cache.generations_offset,
                writes=writes,
            )
        )

    def withdraw(self, pairing_id: str) -> None:
        """See KvSource: the agent ends, and with it all that its metadata allowed."""
        end = self._ends.pop(pairing_id, None)
        if end is not None:
            end.agent.close("the pairing has ended")

    def close(self) -> None:
        """Ends all agents. Idempotent, no await."""
        for pairing_id in list(self._ends):
            self.withdraw(pairing_id)

    async def write(self, request: prefill_pb2.WriteKvRequest, pairing: Pairing) -> prefill_pb2.WriteKvResponse:
        """See KvWriter."""
        end = self._ends.get(pairing.pairing_id)
        if end is None or not end.peer:
            raise NoTransportError("there is no staging region to write to")
        if end.agent.lost:
            raise NoTransportError(end.agent.lost)
        with self._slot(end, request.slot, pairing) as slot_address:
            if not request.hold_id and not request.num_blocks:
                probe = self._region.address + self._pool.kv_cache.probe_offset
                self._check_size(len(self._pool.probe), pairing)
                await end.agent.transfer("WRITE", end.peer, one_piece(probe, len(self._pool.probe)), one_piece(slot_address, len(self._pool.probe)))
                digests = [self._pool.probe_digest]
            else:
                digests = await self._write_blocks(request, pairing, end, slot_address)
        return prefill_pb2.WriteKvResponse(slot=request.slot, grant=request.grant, digests=digests)

    async def _write_blocks(self, request: prefill_pb2.WriteKvRequest, pairing: Pairing, end: _End, slot_address: int) -> list[int]:
        hold = self._holds.find(request.hold_id, pairing.pairing_id)
        self._check_size(request.num_blocks * self._pool.memory.block_bytes, pairing)
        task = asyncio.current_task()
        assert task is not None
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        try:
            with hold.reading(request.first_block, request.num_blocks, stop) as ids:
                return await self._write(end, slot_address, ids)
        except asyncio.CancelledError:
            # A cancel of the hold's own making is an answer to the peer; any other is the end of the RPC.
            if stopped and task.uncancel() == 0:
                raise SourceGoneError("the hold was closed") from None
            raise

    async def _write(self, end: _End, slot_address: int, ids: Sequence[int]) -> list[int]:
        memory = self._pool.memory
        digests: list[int] = []

        def digest(_: threading.Event) -> None:
            digests.extend(memory.digests(ids))

        await run_to_its_end(self._executor, digest, threading.Event())
        pool, slot = Row(self._region.address, memory.block_bytes), Row(slot_address, memory.block_bytes)
        async with end.turn:
            await end.agent.transfer("WRITE", end.peer, *matching(pool, ids, slot, range(len(ids))))
        return digests

    def _check_size(self, num_bytes: int, pairing: Pairing) -> None:
        if num_bytes > pairing.start.nixl_staging.slot_bytes:
            raise HandoverProtocolError(f"{num_bytes} bytes were asked for, a slot has {pairing.start.nixl_staging.slot_bytes}")

    @contextmanager
    def _slot(self, end: _End, index: int, pairing: Pairing) -> Iterator[int]:
        """Address of a slot that nobody else has asked to be written. Raises HandoverProtocolError."""
        staging = pairing.start.nixl_staging
        if index >= staging.num_slots:
            raise HandoverProtocolError(f"slot {index} was asked for, there are {staging.num_slots}")
        if index in end.busy_slots:
            raise HandoverProtocolError(f"slot {index} is being written")
        end.busy_slots.add(index)
        try:
            yield staging.base_address + index * staging.slot_bytes
        finally:
            end.busy_slots.remove(index)
