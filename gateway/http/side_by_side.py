"""Several coroutines at the same time, but no more than a few, and none left when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence


async def side_by_side(works: Sequence[Callable[[], Awaitable[None]]], at_once: int) -> None:
    """Runs all of them in order, `at_once` at a time. The first failure cancels the others, waits for them, and is raised."""
    if len(works) == 1:
        await works[0]()
        return
    waiting = iter(works)

    async def take_turns() -> None:
        for work in waiting:
            await work()

    tasks = [asyncio.create_task(take_turns()) for _ in range(min(at_once, len(works)))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
