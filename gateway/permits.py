"""Admission on the event loop: a permit is the body of an `async with`, given back whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.admission import Admission, Refused, Ticket
from gateway.router import Demand

_RETRY_REFUSED_S = 0.2
"""A decode instance that had no blocks is asked again after this time, should nothing be heard of it before."""


class Permits:
    """The one way to be admitted. On the event loop only."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission

    @asynccontextmanager
    async def admit(
        self, key: str, tenant: str, demand: Demand, *, priority: int, arrival: int, timeout_s: float, waited_s: float = 0.0, again: bool = False
    ) -> AsyncIterator[Ticket]:
        """Waits until the request is admitted; its blocks, tokens and place are held until the block ends.

        Raises Refused (QUEUE_TIMEOUT after max_queue_time_s, of which `waited_s` are gone), TimeoutError after `timeout_s`. A cancel ends the wait at once.
        """
        settled = asyncio.Event()
        ticket = Ticket(key, tenant, priority, arrival, demand, settled.set)
        try:
            self.admission.offer(ticket, again=again)
            if ticket.route is None:
                await self._wait(ticket, settled, timeout_s, self.admission.limits.max_queue_time_s - waited_s)
            yield ticket
        finally:
            self.admission.end(ticket)

    async def _wait(self, ticket: Ticket, settled: asyncio.Event, timeout_s: float, limit_s: float) -> None:
        try:
            async with asyncio.timeout(min(limit_s, timeout_s)):
                await settled.wait()
        except TimeoutError:
            if timeout_s <= limit_s:
                raise
            raise Refused("QUEUE_TIMEOUT", self.admission.retry_after_s()) from None
        if ticket.refused is not None:
            raise ticket.refused

    def refused_by_decode(self, ticket: Ticket) -> None:
        """Decode answered that it has no blocks: nothing more goes there until it is heard of again, or a short time has passed."""
        self.admission.refused_by_decode(ticket)
        if ticket.route is not None:
            asyncio.get_running_loop().call_later(_RETRY_REFUSED_S, self.admission.retry, ticket.route.decode.name)
