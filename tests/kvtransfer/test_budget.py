"""Bytes in flight are bounded, served in order, and never lost to a cancel."""

from __future__ import annotations

import asyncio

import pytest

from kvtransfer.budget import ByteBudget, ProgressLimit
from kvtransfer.errors import StalledError


async def test_bytes_are_bounded_and_served_in_order() -> None:
    budget, order, most = ByteBudget(10), [], [0]

    async def work(name: str, num_bytes: int) -> None:
        async with budget.take(num_bytes):
            order.append(name)
            most[0] = max(most[0], 10 - budget.num_free_bytes)
            await asyncio.sleep(0)

    await asyncio.gather(work("a", 6), work("b", 6), work("c", 2), work("all", 99), work("d", 1))
    assert order == ["a", "b", "c", "all", "d"]
    assert most[0] <= 10
    assert budget.num_free_bytes == 10


async def test_cancelled_waiters_lose_nothing_and_hold_nobody_up() -> None:
    budget = ByteBudget(10)
    async with budget.take(8):
        taking_big, taking_small = budget.take(9), budget.take(2)
        big = asyncio.ensure_future(taking_big.__aenter__())
        small = asyncio.ensure_future(taking_small.__aenter__())
        await asyncio.sleep(0)
        assert not small.done()
        big.cancel()
        await asyncio.wait_for(small, 5)
        assert budget.num_free_bytes == 0
    assert budget.num_free_bytes == 8


async def test_a_waiter_cancelled_in_the_moment_of_its_turn_gives_it_on() -> None:
    budget = ByteBudget(10)
    holder = budget.take(10)
    await holder.__aenter__()
    waiter = asyncio.ensure_future(budget.take(10).__aenter__())
    await asyncio.sleep(0)
    await holder.__aexit__(None, None, None)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert budget.num_free_bytes == 10


async def test_only_enough_bytes_open_the_next_window() -> None:
    now = [0.0]
    limit = ProgressLimit(window_s=10.0, min_bytes=100, clock=lambda: now[0])
    limit.moved(99)
    now[0] = 10.0
    with pytest.raises(StalledError, match="99 bytes in 10 s"):
        await limit.wait(asyncio.Event().wait())
    limit.moved(1)
    now[0] = 19.0
    assert await limit.wait(asyncio.sleep(0, "done")) == "done"
