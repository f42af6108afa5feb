"""One deadline, the client's, passed on at every hop and 20 ms shorter each time, so that the hop where it passed can tell its phase."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from rpc.errors import deadline_exceeded

HOP_MARGIN_S: Final = 0.020


def remaining_s(context: grpc.aio.ServicerContext[Any, Any], default_s: float) -> float:
    """Seconds that the RPC being served has left: its deadline, or `default_s` (max_request_time_s) when it has none or a later one."""
    remaining: float | None = context.time_remaining()  # None without a deadline, whatever the stubs say
    return default_s if remaining is None else min(remaining, default_s)


@asynccontextmanager
async def at_most(max_request_time_s: float, phase: str) -> AsyncIterator[None]:
    """Bounds an RPC whatever its client asked for: none holds anything for longer. Raises StatusError DEADLINE_EXCEEDED."""
    try:
        async with asyncio.timeout(max_request_time_s) as bound:
            yield
    except TimeoutError:
        if not bound.expired():
            raise
        raise deadline_exceeded(phase) from None


def next_hop_s(remaining: float, phase: str = "routing") -> float:
    """The timeout to give to the next hop; raises StatusError DEADLINE_EXCEEDED with the phase when nothing is left to give."""
    if remaining <= HOP_MARGIN_S:
        raise deadline_exceeded(phase)
    return remaining - HOP_MARGIN_S
