"""A queue that grows is told from one that wanders, and a ramp from both."""

from __future__ import annotations

import numpy as np
import pytest

from bench.record import Outcome
from bench.stability import in_flight, stability
from tests.bench.records import queue_records, record


@pytest.mark.parametrize("exponential", [False, True])
@pytest.mark.parametrize(("load", "least"), [(0.5, 0.95), (0.8, 0.9), (0.9, 0.8)])
def test_a_server_that_keeps_up_is_stable(load: float, least: float, exponential: bool) -> None:
    rng = np.random.default_rng(5)
    stable = [stability(queue_records(load, 400, rng, exponential=exponential)).stable for _ in range(40)]
    assert np.mean(stable) >= least


@pytest.mark.parametrize("exponential", [False, True])
@pytest.mark.parametrize("load", [1.3, 2.0, 10.0])
def test_a_server_that_falls_behind_is_not(load: float, exponential: bool) -> None:
    rng = np.random.default_rng(6)
    stable = [stability(queue_records(load, 400, rng, exponential=exponential)).stable for _ in range(40)]
    assert np.mean(stable) <= 0.05


def test_growth_is_the_share_of_requests_that_stay_behind() -> None:
    found = stability(queue_records(2.0, 4000, np.random.default_rng(7)))
    assert found.growth_share == pytest.approx(0.5, abs=0.03)
    assert found.lag_share == pytest.approx(0.5, abs=0.03)


def test_long_answers_that_all_end_in_time_are_a_ramp_and_no_backlog() -> None:
    rng = np.random.default_rng(8)
    due = np.cumsum(rng.exponential(0.1, 400))
    assert stability([record(index, due_s=float(at), at_s=[float(at) + 12.0]) for index, at in enumerate(due)]).stable


def test_requests_that_are_refused_at_once_are_not_in_flight() -> None:
    records = [record(index, due_s=index / 10, outcome=Outcome.REFUSED) for index in range(200)]
    assert stability(records).num_in_flight == pytest.approx(0)


def test_a_request_waits_from_its_scheduled_time_on() -> None:
    late = [record(index, due_s=index / 10, sent_s=index / 5, at_s=[index / 5 + 0.1]) for index in range(300)]
    assert not stability(late).stable


def test_in_flight_is_the_mean_over_a_piece() -> None:
    assert in_flight(np.array([0.0, 1.0]), np.array([2.0, 1.5]), np.array([0.0, 1.0, 2.0])).tolist() == [1.0, 1.5]


def test_too_few_requests_to_tell_count_as_stable() -> None:
    assert stability([record(index, due_s=index, at_s=[100.0]) for index in range(5)]).stable
