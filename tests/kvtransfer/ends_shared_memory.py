"""`shared_memory` in the contract suite."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvtransfer.block_copy import CopyStop, Ids, copy_blocks
from kvtransfer.descriptor_sockets import DescriptorSockets
from kvtransfer.memories import Blocks
from kvtransfer.shared_memory import SharedMemoryReader, SharedMemorySource
from tests.kvtransfer.kinds import Opened, TwoPools, kind


@kind("shared_memory", one_sided=True)
@asynccontextmanager
async def open_shared_memory(two: TwoPools) -> AsyncIterator[Opened]:
    """A real socket, a real mapping of the memfd, in one process."""

    def copy(source: Blocks, source_ids: Sequence[int] | Ids, destination: Blocks, destination_ids: Sequence[int] | Ids, stop: CopyStop) -> bool:
        done = copy_blocks(source, source_ids, destination, destination_ids, stop)
        two.gate.middle()
        return done

    with tempfile.TemporaryDirectory() as directory:
        sockets = DescriptorSockets(Path(directory))
        sockets.start()
        try:
            yield Opened(SharedMemorySource(two.pool, sockets), lambda: SharedMemoryReader(two.executor, Path(directory), copy=copy), sockets.close)
        finally:
            await sockets.close()
