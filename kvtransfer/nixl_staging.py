"""Where prefill's NIXL agent writes: a region of slots for one pairing, apart from decode's pool, registered with an agent that has nothing else."""

from __future__ import annotations

import asyncio
import logging
import mmap
import secrets
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.kv_cache import populate
from kvtransfer.errors import NoTransportError, SourceGoneError
from kvtransfer.memories import Blocks
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.nixl_pieces import Region
from tandem.v1 import kv_pb2

_log = logging.getLogger(__name__)
NUM_SLOTS = 3
SLOT_BYTES = 16 << 20
"""One RPC each: with slots of 4 MiB a third of the time went into them."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot, under one grant."""

    index: int
    bytes: Blocks
    """All of it, [slot_bytes]."""
    grant: int = field(default_factory=lambda: secrets.randbits(64), repr=False)
    """Random and never used again: what a late or foreign answer does not name."""


class NixlStaging:
    """The slots, first come, first served. A slot is granted again only when nothing writes to it any more; where that is not known, the whole region is burnt:
    its agent is destroyed, after which nobody can write to it, and the pairing has to be made anew. Lives on the event loop.
    """

    def __init__(self, nixl: Any, *, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        memory = mmap.mmap(-1, num_slots * slot_bytes)
        self._slots = np.frombuffer(memory, np.uint8).reshape(num_slots, slot_bytes)
        self._free = deque(range(num_slots))
        self._waiting: deque[asyncio.Future[int]] = deque()
        # The slots get their memory, 30 ms, where nobody waits but who waits for the agent: the first write should not have to.
        self.agent = NixlAgent(nixl, [Region.of(self._slots)], begin=lambda: populate(memory))

    @property
    def lost(self) -> str:
        """Why no slot is granted any more; empty while they are."""
        return self.agent.lost

    @property
    def num_free(self) -> int:
        """Slots that can be granted at once."""
        return len(self._free)

    def describe(self, within_s: float) -> kv_pb2.NixlStaging:
        """What prefill has to know to write: never logged. Waits for the agent if it is not open yet. Raises NoTransportError."""
        try:
            metadata = self.agent.opened.result(within_s)
        except TimeoutError:
            raise NoTransportError(f"NIXL has no agent after {within_s:g} s") from None
        return kv_pb2.NixlStaging(agent_metadata=metadata, base_address=self._slots.ctypes.data, num_slots=self.num_slots, slot_bytes=self.slot_bytes)

    async def take(self) -> Slot:
        """Waits for a slot and grants it; the caller must `give` it back or `burn` the region. Raises SourceGoneError."""
        if self.lost:
            raise SourceGoneError(self.lost)
        if self._free and not self._waiting:
            index = self._free.popleft()
        else:
            turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                index = await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._grant_next(turn.result())
                raise
        return Slot(index, self._slots[index])

    def give(self, slot: Slot) -> None:
        """Nothing writes to the slot any more."""
        self._grant_next(slot.index)

    def burn(self, reason: str) -> None:
        """Something may still write to a slot. Idempotent, no await."""
        if not self.lost:
            _log.warning("a staging region of NIXL is given up: %s", reason)
        self.close(reason)

    def close(self, reason: str = "the reader is closed") -> None:
        """Grants no slot any more. Idempotent, no await."""
        self.agent.close(reason, within_s=0.0)
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(SourceGoneError(self.lost))

    def _grant_next(self, index: int) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(index)
                return
        self._free.append(index)
