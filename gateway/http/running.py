"""The HTTP requests that run, and how a drain waits for them and ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rpc.errors import StatusError, unavailable

_DRAIN_RETRY_S: Final = 1.0


class RunningRequests:
    """Construct it on the event loop that serves."""

    def __init__(self) -> None:
        self.draining = False
        self.num_running = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when a drain's grace is over: everything still running ends."""
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts a request while the block runs. Raises StatusError DRAINING when none may begin."""
        if self.draining:
            raise shutting_down()
        self.num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if not self.num_running:
                self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no request runs; False when `timeout_s` passed before."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def end_all(self) -> None:
        """Every request that runs ends with DRAINING."""
        if not self.ended.done():
            self.ended.set_result(None)


def shutting_down() -> StatusError:
    """For a request that comes too late, and for one that took too long."""
    return unavailable("DRAINING", "the server is shutting down", _DRAIN_RETRY_S)
