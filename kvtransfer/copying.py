"""Work in a thread that its caller always outlives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor


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
