"""Tasks of the samples of one RPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

Start = Callable[[Coroutine[Any, Any, None]], None]


@asynccontextmanager
async def sample_tasks() -> AsyncIterator[Start]:
    """A TaskGroup; what is started in it has ended when the block is left. The first error ends the others and leaves bare, not as a group."""
    tasks: list[asyncio.Task[None]] = []
    try:
        async with asyncio.TaskGroup() as group:
            yield lambda work: tasks.append(group.create_task(work))
            # In the body: while a group waits at its own end, its failed task's cancel of this one is never taken back (Python 3.11).
            if tasks:
                await asyncio.wait(tasks)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
