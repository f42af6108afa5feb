"""The server with known delays that `make check-bench` measures against, and what that check would find."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from bench.arrivals import Closed, Poisson
from bench.record import Outcome
from checks.bench_delays import Kind, course_of, key_of
from checks.bench_load import KnownServer, Load, Loaded, known_server
from checks.bench_truth import hold, off, pairs
from tests.bench.scripted import WAIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[KnownServer]:
    async with known_server() as running:
        yield running


async def _load(server: KnownServer, load: Load) -> Loaded:
    return await asyncio.wait_for(server.load(load), 2 * WAIT_S)


def _of_outcomes(wrong: tuple[str, ...]) -> list[str]:
    """What no busy machine can be the reason of."""
    return [text for text in wrong if "count as" in text or "counts as" in text or "attainment" in text or "over all requests" in text]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_token_is_seen_behind_its_sending_and_every_fault_is_a_miss_of_its_kind(server: KnownServer, protocol: str) -> None:
    loaded = await _load(server, Load(protocol, Poisson(50.0), 60, num_warm_up=2, faults=True))
    among = pairs(loaded)
    assert {pair.served.kind for pair in among} == set(Kind)
    for pair in among:
        seen = [each.at_s + loaded.start_s for each in pair.record.arrived]
        assert len(seen) <= len(pair.served.sent_s)
        assert all(after >= before for before, after in zip(pair.served.sent_s, seen, strict=False)), pair
    assert _of_outcomes(hold(loaded).wrong) == []


async def test_a_stall_is_felt_by_all_that_were_due_in_an_open_loop_and_by_those_out_in_a_closed_one(server: KnownServer) -> None:
    opened = await _load(server, Load("grpc", Poisson(40.0), 60, num_warm_up=0, stall_after_s=0.3, stall_s=0.8))
    begin_s, end_s = opened.stall
    due = [pair for pair in pairs(opened) if begin_s <= pair.scheduled_s < end_s]
    assert len(due) > 10
    assert all(pair.record.arrived[0].at_s + opened.start_s >= end_s for pair in due)
    closed = await _load(server, Load("grpc", Closed(4), 30, num_warm_up=0, stall_after_s=0.3, stall_s=0.8))
    begin_s, end_s = closed.stall
    assert sum(pair.scheduled_s < end_s and pair.served.sent_s[0] >= end_s for pair in pairs(closed)) <= 4


async def test_a_figure_or_an_outcome_that_is_not_the_servers_is_found(server: KnownServer) -> None:
    loaded = await _load(server, Load("http", Closed(4), 12, num_warm_up=0))
    assert _of_outcomes(hold(loaded).wrong) == []
    records = list(loaded.run.records)
    shifted = [replace(record, arrived=tuple(replace(each, at_s=each.at_s + 0.05) for each in record.arrived)) for record in records]
    found = hold(replace(loaded, run=replace(loaded.run, records=tuple(shifted)))).wrong
    assert any("TTFT p50" in text for text in found) and any("first tokens are seen" in text for text in found)
    refused = (replace(records[0], outcome=Outcome.REFUSED), *records[1:])
    assert _of_outcomes(hold(replace(loaded, run=replace(loaded.run, records=refused))).wrong)


async def test_delays_are_drawn_from_the_prompt_alone_and_have_the_stated_distributions() -> None:
    assert key_of([1, 2, 3]) == key_of((1, 2, 3)) != key_of([1, 2, 4])
    courses = [course_of(key, 20, faults=False) for key in range(2000)]
    assert courses[7] == course_of(7, 20, faults=False)
    first = np.array([course.at_s[0] for course in courses])
    gaps = np.concatenate([np.diff(course.at_s) for course in courses])
    assert abs(np.median(first) - 0.060) < 0.004
    assert 0.02 < (np.abs(gaps - 0.080) < 1e-9).mean() < 0.04
    assert abs(np.median(gaps) - 0.0146) < 0.001


async def test_a_figure_may_be_off_by_a_millisecond_or_by_two_per_cent_and_no_more() -> None:
    assert not off(0.0109, 0.010) and off(0.0111, 0.010)
    assert not off(1.019, 1.0) and off(1.021, 1.0) and off(float("nan"), 1.0)
