"""Reading by NIXL: decode's agent, with decode's pool registered, reads prefill's pool on its own. Its metadata is never given away."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from kvtransfer.errors import StaleBlockError
from kvtransfer.held_blocks import Generations, Ids, held_blocks
from kvtransfer.memories import Blocks
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.nixl_pieces import Region, Row, matching, one_piece
from kvtransfer.transport import Probe
from tandem.v1 import kv_pb2, prefill_pb2

_MAX_LOOKED_AT = 4096
"""Generations that are read at once."""
_MAX_OTHERS = 4
"""Memories besides the pool that stay registered."""
NewAgent = Callable[[Any, Sequence[Region]], NixlAgent]


class NixlPull:
    """Attached to one prefill instance's pool. Lives on the event loop."""

    def __init__(self, nixl: Any, pool: Blocks, offer: prefill_pb2.PairResponse, source: kv_pb2.NixlSource, new_agent: NewAgent) -> None:
        self._pool = pool
        self._source = source
        self._num_blocks = offer.num_blocks
        self._probe = np.zeros(offer.probe_bytes, np.uint8)
        self._generations = np.zeros(_MAX_LOOKED_AT, np.uint32)
        self._looking = asyncio.Lock()
        self._registering = asyncio.Lock()
        self._others: OrderedDict[int, tuple[Region, list[int]]] = OrderedDict()
        """Registered by address, the one used last at the end, each with the number of its readers."""
        self._peer = ""
        self.agent = new_agent(nixl, [Region.of(pool), Region.of(self._probe), Region.of(self._generations)])

    async def connect(self) -> None:
        """Raises NoTransportError, HandoverProtocolError, SourceGoneError."""
        await self.agent.metadata()
        self._peer = await self.agent.connect(self._source.agent_metadata)

    async def probe(self) -> Probe:
        """See KvReader."""
        async with self._looking:
            own = one_piece(self._probe.ctypes.data, len(self._probe))
            started = time.perf_counter()
            await self.agent.transfer("READ", self._peer, own, one_piece(self._source.probe_address, len(self._probe)))
            return Probe(self._probe.tobytes(), time.perf_counter() - started)

    async def read(self, ready: kv_pb2.KvReady, blocks: Blocks, to: Sequence[int]) -> None:
        """See KvReader."""
        ids, generations = held_blocks(ready.block_ids, ready.generations, num_blocks=self._num_blocks, num_rows=len(to))
        async with self._registered(blocks):
            await self._look(ids, generations, "before it was copied")
            own, remote = Row(blocks.ctypes.data, blocks.shape[1]), Row(self._source.base_address, blocks.shape[1])
            await self.agent.transfer("READ", self._peer, *matching(own, to, remote, ids.tolist()))
            await self._look(ids, generations, "while it was copied")

    def close(self, reason: str = "the reader is closed") -> None:
        """Idempotent, no await."""
        self.agent.close(reason)

    async def _look(self, ids: Ids, generations: Generations, when: str) -> None:
        """Raises StaleBlockError unless the pool has these generations now."""
        table = Row(self._source.generations_address, 4)
        for start in range(0, len(ids), _MAX_LOOKED_AT):
            part, due = ids[start : start + _MAX_LOOKED_AT], generations[start : start + _MAX_LOOKED_AT]
            async with self._looking:
                found = self._generations[: len(part)]
                found[:] = 0  # no held block's: what does not arrive is not taken for what arrived last time
                await self.agent.transfer("READ", self._peer, *matching(Row(found.ctypes.data, 4), range(len(part)), table, part.tolist()))
                held = bool((found == due).all())
            if not held:
                raise StaleBlockError(f"a block was given to another use {when}")

    @asynccontextmanager
    async def _registered(self, blocks: Blocks) -> AsyncIterator[None]:
        """Registers memory other than the pool, and keeps it so: it is used again. What was used longest ago goes."""
        if blocks is self._pool or blocks.ctypes.data == self._pool.ctypes.data:
            yield
            return
        async with self._registering:
            users = (await self._other(Region.of(blocks)))[1]
            users.append(1)
        try:
            yield
        finally:
            users.pop()

    async def _other(self, region: Region) -> tuple[Region, list[int]]:
        known = self._others.get(region.address)
        if known is not None and known[0].num_bytes >= region.num_bytes:
            self._others.move_to_end(region.address)
            return known
        unused = [address for address, (_, users) in self._others.items() if not users]
        for address in unused[: max(len(self._others) + 1 - _MAX_OTHERS, 0)]:
            await self.agent.deregister(self._others[address][0])
            del self._others[address]
        await self.agent.register(region)
        self._others[region.address] = (region, [])
        return self._others[region.address]
