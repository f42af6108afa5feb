from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.admission import Refused
from gateway.instances import Role
from gateway.limits import AdmissionLimits
from gateway.permits import Permits
from gateway.router import Demand
from tests.gateway.desk import Desk


async def until_waiting(desk: Desk, num_waiting: int) -> None:
    async with asyncio.timeout(5):
        while desk.admission.num_waiting < num_waiting:  # noqa: ASYNC110  # admission is pure and has no event
            await asyncio.sleep(0)


def permit(permits: Permits, key: str, **fields: Any) -> Any:
    return permits.admit(key, "t", Demand(16, 16), **{"priority": 0, "arrival": permits.admission.next_arrival(), "timeout_s": 5.0, **fields})


async def test_a_permit_is_given_back_however_its_block_ends() -> None:
    desk = Desk(limits=AdmissionLimits(max_active_requests=1))
    permits = Permits(desk.admission)
    async with permit(permits, "a"):
        assert desk.admission.num_active == 1
    with pytest.raises(ZeroDivisionError):
        async with permit(permits, "a"):
            raise ZeroDivisionError
    entered = asyncio.Event()

    async def hold() -> None:
        async with permit(permits, "a"):
            entered.set()
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    await entered.wait()
    holder.cancel()
    await asyncio.wait([holder])
    desk.admission.assert_nothing_held()


async def test_a_wait_ends_at_once_with_a_cancel_and_in_time_with_a_limit() -> None:
    desk = Desk(limits=AdmissionLimits(max_active_requests=1, max_queue_time_s=0.05))
    permits = Permits(desk.admission)

    async def enter(key: str, **fields: Any) -> None:
        async with permit(permits, key, **fields):
            pass

    async with permit(permits, "a"):
        waiting = asyncio.create_task(enter("b"))
        await until_waiting(desk, 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert desk.admission.num_waiting == 0
        with pytest.raises(Refused, match="QUEUE_TIMEOUT"):
            await enter("c")
        with pytest.raises(TimeoutError):
            await enter("d", timeout_s=0.01)
        assert desk.admission.num_waiting == 0
        late = asyncio.create_task(enter("e"))
        await until_waiting(desk, 1)
        desk.report("d0", Role.DECODE, draining=True)
        with pytest.raises(Refused, match="NO_DECODE"):
            await late
    desk.admission.assert_nothing_held()


async def test_the_next_in_the_queue_is_admitted_when_a_permit_is_given_back() -> None:
    desk = Desk(limits=AdmissionLimits(max_active_requests=1))
    permits = Permits(desk.admission)
    order: list[str] = []

    async def enter(key: str, priority: int) -> None:
        async with permit(permits, key, priority=priority):
            order.append(key)

    async with permit(permits, "first"):
        tasks = [asyncio.create_task(enter(key, priority)) for key, priority in (("b", 1), ("c", 0), ("d", 0), ("a", -1))]
        await until_waiting(desk, 4)
    await asyncio.gather(*tasks)
    assert order == ["a", "c", "d", "b"]
    desk.admission.assert_nothing_held()
