"""Bounds of what one peer may have in flight and of how slow it may be, both in bytes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from kvtransfer.errors import StalledError

_T = TypeVar("_T")


class ByteBudget:
    """A semaphore in bytes: first come, first served. Who asks for more than all of it gets all of it."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self.max_bytes = max_bytes
        self.num_free_bytes = max_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, num_bytes: int) -> AsyncIterator[None]:
        """Waits for the bytes and gives them back at the end of the block."""
        share = min(num_bytes, self.max_bytes)
        await self._take(share)
        try:
            yield
        finally:
            self._give(share)

    async def _take(self, share: int) -> None:
        if not self._waiting and share <= self.num_free_bytes:
            self.num_free_bytes -= share
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((share, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self._give(share if turn.done() and not turn.cancelled() else 0)
            raise

    def _give(self, share: int) -> None:
        self.num_free_bytes += share
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self.num_free_bytes):
            granted, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.num_free_bytes -= granted
                turn.set_result(None)


class ProgressLimit:
    """At least `min_bytes` in every `window_s`: a peer that only trickles, or only answers pings, is found."""

    def __init__(self, window_s: float = 10.0, min_bytes: int = 65536, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._min_bytes = min_bytes
        self._clock = clock
        self._ends = clock() + window_s
        self._num_bytes = 0

    async def wait(self, step: Awaitable[_T]) -> _T:
        """Awaits one step of the transfer within what is left of the window. Raises StalledError."""
        try:
            async with asyncio.timeout(max(self._ends - self._clock(), 0.0)):
                return await step
        except TimeoutError:
            raise StalledError(f"{self._num_bytes} bytes in {self._window_s:g} s, at least {self._min_bytes} asked for") from None

    def moved(self, num_bytes: int) -> None:
        """Counts bytes; enough of them open the next window."""
        self._num_bytes += num_bytes
        if self._num_bytes >= self._min_bytes:
            self._num_bytes = 0
            self._ends = self._clock() + self._window_s
