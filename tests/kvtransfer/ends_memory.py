"""`memory` in the contract suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtransfer.memory import MemoryReader, MemorySource
from tests.kvtransfer.kinds import Opened, TwoPools, kind


@kind("memory", one_sided=False)
@asynccontextmanager
async def open_memory(two: TwoPools) -> AsyncIterator[Opened]:
    """Two engines of this process."""
    source = MemorySource(two.pool, two.holds)

    async def dies() -> None:
        source.close()

    try:
        yield Opened(source, lambda: MemoryReader(two.executor), dies)
    finally:
        source.close()
