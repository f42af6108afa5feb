"""Copying blocks in a thread that its caller always outlives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor

import numpy as np

from kvtransfer.memories import Blocks


async def run_to_its_end(executor: Executor, work: Callable[[threading.Event], None], stop: threading.Event) -> None:
    """Runs `work(stop)` in the executor and returns only once it has ended: a cancel sets `stop`, waits, and is raised then.

    Work that has not begun when the cancel comes never begins, so that nobody waits behind another one's copy.
    """
    submitted = executor.submit(work, stop)
    future = asyncio.wrap_future(submitted)
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        if not submitted.cancel():
            await _ended(future)
        raise


async def _ended(future: asyncio.Future[None]) -> None:
    """Waits through further cancels; what the future ended with is looked at, so that it is not reported as lost."""
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()


def copy_blocks(source: Blocks, source_ids: Sequence[int], destination: Blocks, destination_ids: Sequence[int], stop: threading.Event) -> bool:
    """Copies block by block, neighbours in one go and without the GIL; ends early and returns False once `stop` is set."""
    for start, end in _runs(source_ids, destination_ids):
        if stop.is_set():
            return False
        first, to, count = source_ids[start], destination_ids[start], end - start
        np.copyto(destination[to : to + count], source[first : first + count])
    return True


_MAX_RUN_BLOCKS = 16


def _runs(source_ids: Sequence[int], destination_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Index ranges in which both sides are neighbours, at most _MAX_RUN_BLOCKS long so that a stop is seen soon."""
    start = 0
    for index in range(1, len(source_ids) + 1):
        apart = index == len(source_ids) or source_ids[index] != source_ids[index - 1] + 1 or destination_ids[index] != destination_ids[index - 1] + 1
        if apart or index - start == _MAX_RUN_BLOCKS:
            yield start, index
            start = index
