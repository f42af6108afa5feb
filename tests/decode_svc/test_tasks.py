"""Tasks of samples end together, and leave the task that waits for them as it was."""

from __future__ import annotations

import asyncio

import pytest

from decode_svc.failures import is_own_cancel
from decode_svc.tasks import sample_tasks


class _Ended(Exception):
    pass


async def _fail() -> None:
    await asyncio.sleep(0)
    raise _Ended


async def _wait(ended: list[bool]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(is_own_cancel())


@pytest.mark.parametrize("waits_in_body", [True, False])
async def test_the_first_error_ends_the_others_and_leaves_bare(waits_in_body: bool) -> None:
    ended: list[bool] = []

    async def work() -> None:
        async with sample_tasks() as start:
            start(_wait(ended))
            start(_fail())
            if waits_in_body:
                await asyncio.Event().wait()

    with pytest.raises(_Ended):
        await work()
    assert ended == [True]
    assert not is_own_cancel(), "a deadline of the RPC behind this would not be told from a cancel"


async def test_an_error_in_the_body_ends_the_tasks() -> None:
    ended: list[bool] = []

    async def work() -> None:
        async with sample_tasks() as start:
            start(_wait(ended))
            await _fail()

    with pytest.raises(_Ended):
        await work()
    assert ended == [True]


async def test_a_cancel_ends_the_tasks_and_stays_one() -> None:
    ended: list[bool] = []

    async def outer() -> None:
        async with sample_tasks() as start:
            start(_wait(ended))

    task = asyncio.ensure_future(outer())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert ended == [True]


async def test_a_block_that_is_left_has_waited_for_its_tasks() -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        await asyncio.sleep(0)
        done.append(number)

    async with sample_tasks() as start:
        for number in range(3):
            start(work(number))
    assert done == [0, 1, 2]
