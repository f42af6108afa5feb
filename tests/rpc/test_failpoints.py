from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from rpc.failpoints import active_failpoints, configure_failpoints, failpoint, failpoint_sync


@pytest.fixture(autouse=True)
def _cleared() -> Iterator[None]:
    yield
    configure_failpoints("")


async def test_named_point_waits_and_others_do_not() -> None:
    configure_failpoints("tokenize=delay:0.05, kv.hold=delay:30")
    started_s = time.monotonic()
    await failpoint("queue")
    failpoint_sync("queue")
    assert time.monotonic() - started_s < 0.04
    await failpoint("tokenize")
    assert time.monotonic() - started_s >= 0.05
    failpoint_sync("tokenize")
    assert time.monotonic() - started_s >= 0.1


async def test_waiting_point_can_be_cancelled() -> None:
    configure_failpoints("decode=delay:30")
    task = asyncio.create_task(failpoint("decode"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("text", ["tokenize", "tokenize=delay:soon", "tokenize=delay:nan", "tokenize=delay:-1", "tokenize=explode:1", "tokeniser=delay:1"])
def test_faulty_entry_is_named_and_changes_nothing(text: str) -> None:
    configure_failpoints("route=delay:0.5")
    with pytest.raises(ValueError, match=text.partition("=")[0]):
        configure_failpoints(text)

    assert active_failpoints() == {"route": 0.5}


def test_point_costs_next_to_nothing_when_unset() -> None:
    started_s = time.perf_counter()
    for _ in range(100_000):
        failpoint_sync("decode")

    assert (time.perf_counter() - started_s) / 100_000 < 5e-6
