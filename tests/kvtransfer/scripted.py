"""A reader that does what a test says, for what is around readers: the choice, the path."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvtransfer.memories import host_array
from kvtransfer.transport import Probe, Rows
from tandem.v1 import kv_pb2, prefill_pb2

Step = Callable[[], Awaitable[None]]


async def at_once() -> None:
    """A step without anything in it."""


class ScriptedReader:
    """Each block it reads is full of its number in the sequence."""

    def __init__(self, name: str = "memory", *, attach: Step = at_once, probe: Step = at_once, read: Step = at_once, max_segment_bytes: int = 1 << 20) -> None:
        self.name = name
        self.max_segment_bytes = max_segment_bytes
        self.content, self.elapsed_s = b"probe", 1.0
        self.runs: list[kv_pb2.KvReady] = []
        self.num_running = 0
        self.num_bytes, self.most_bytes = 0, 0
        self.num_closed = 0
        self.began = asyncio.Event()
        self._attach, self._probe, self._read = attach, probe, read

    def greet(self, start: prefill_pb2.PairStart) -> None:
        """See KvReader."""

    async def attach(self, offer: prefill_pb2.PairResponse, source: kv_pb2.KvSource) -> None:
        """See KvReader."""
        self.began.set()
        await self._attach()

    async def probe(self) -> Probe:
        """See KvReader."""
        self.began.set()
        await self._probe()
        return Probe(self.content, self.elapsed_s)

    async def read(self, ready: kv_pb2.KvReady, to: Rows) -> None:
        """See KvReader."""
        self.runs.append(ready)
        num_bytes = ready.num_blocks * to.memory.block_bytes
        self.num_running += 1
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        self.began.set()
        try:
            await self._read()
            for index, block in enumerate(to.ids):
                host_array(to.memory)[block] = ready.first_block + index
        finally:
            self.num_running -= 1
            self.num_bytes -= num_bytes

    def close(self) -> None:
        """See KvReader."""
        self.num_closed += 1
