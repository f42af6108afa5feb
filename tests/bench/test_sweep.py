"""The search finds the knee of servers whose knee is known, and says so when there is none to find."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.goodput import Limits
from bench.record import Record
from bench.run import Run
from bench.sweep import Found, Search, Sweep, Verdict, find_knee, judge
from tests.bench.records import queue_records, record, run_of

_NUM_REQUESTS = 600


def _queue(seed: int, *, service_s: float = 1.0, exponential: bool = False) -> Callable[[float], Sequence[Record]]:
    rng = np.random.default_rng(seed)
    return lambda rate: queue_records(rate, _NUM_REQUESTS, rng, service_s=service_s, exponential=exponential)


async def _find(records_at: Callable[[float], Sequence[Record]], search: Search, *, void: Callable[[float], tuple[str, ...]] = lambda rate: ()) -> Sweep:
    async def load(rate: float) -> Run:
        return run_of(records_at(rate), label=f"{rate:g}/s", void=void(rate))

    return await find_knee(load, search)


def _steps(knee: float) -> Callable[[float], Sequence[Record]]:
    """A server without chance: in time up to the knee, late above it."""
    return lambda rate: [record(index, due_s=index / rate, at_s=[index / rate + (0.1 if rate <= knee else 5.0)]) for index in range(100)]


@functools.cache
def _fixed_service_knee(limit_s: float) -> float:
    """Of M/D/1 with a service time of 1, from long runs."""
    rng = np.random.default_rng(99)
    rates = np.linspace(0.6, 0.95, 15)
    met = [np.mean([each.ended_s - each.scheduled_s <= limit_s for each in queue_records(rate, 20_000, rng)]) for rate in rates]
    return float(np.interp(-0.9, -np.array(met), rates))


@settings(max_examples=25, deadline=None)
@given(knee=st.floats(0.05, 500), start=st.floats(0.02, 900), width=st.floats(0.02, 0.5))
async def test_finds_the_knee_of_a_server_without_chance_within_the_width(knee: float, start: float, width: float) -> None:
    sweep = await _find(_steps(knee), Search(Limits(ttft_s=1), start_per_s=start, min_per_s=0.01, width=width, max_probes=60))
    assert sweep.found is Found.KNEE
    assert sweep.knee_per_s is not None and sweep.bad_per_s is not None
    assert sweep.knee_per_s <= knee < sweep.bad_per_s
    assert (sweep.bad_per_s - sweep.knee_per_s) / sweep.bad_per_s <= width


@pytest.mark.parametrize("seed", range(5))
async def test_finds_the_knee_of_an_exponential_server(seed: int) -> None:
    # M/M/1: the time in the system is exponential with rate mu - lambda, so that P(T <= d) = 0.9 at mu - ln(10) / d.
    limit_s, knee = 8.0, 1 - math.log(10) / 8.0
    sweep = await _find(_queue(seed, exponential=True), Search(Limits(e2e_s=limit_s), start_per_s=0.2, width=0.05))
    assert sweep.found is Found.KNEE
    assert sweep.knee_per_s == pytest.approx(knee, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
async def test_finds_the_knee_of_a_server_with_fixed_service(seed: int) -> None:
    limit_s = 4.0
    sweep = await _find(_queue(seed), Search(Limits(e2e_s=limit_s), start_per_s=0.3, width=0.05))
    assert sweep.found is Found.KNEE
    assert sweep.knee_per_s == pytest.approx(_fixed_service_knee(limit_s), rel=0.1)


@pytest.mark.parametrize("seed", range(3))
async def test_without_limits_the_knee_is_where_the_queue_begins_to_grow(seed: int) -> None:
    sweep = await _find(_queue(seed, service_s=0.05), Search(Limits(), start_per_s=1.0, width=0.05))
    assert sweep.found is Found.KNEE
    assert sweep.knee_per_s is not None and 0.85 * 20 <= sweep.knee_per_s <= 1.2 * 20


async def test_a_server_that_is_good_at_every_rate_ends_at_the_cap() -> None:
    sweep = await _find(_steps(math.inf), Search(Limits(ttft_s=1), start_per_s=3, max_per_s=50))
    assert (sweep.found, sweep.knee_per_s, sweep.bad_per_s) == (Found.ABOVE_MAX, 50, None)
    assert max(probe.rate_per_s for probe in sweep.probes) == 50


async def test_a_server_that_is_good_at_no_rate_has_no_knee() -> None:
    sweep = await _find(_steps(0.0), Search(Limits(ttft_s=1), start_per_s=3, min_per_s=0.5))
    assert (sweep.found, sweep.knee_per_s, sweep.bad_per_s) == (Found.BELOW_MIN, None, 0.5)


async def test_runs_up_to_twice_the_knee() -> None:
    sweep = await _find(_steps(7.0), Search(Limits(ttft_s=1), start_per_s=1, width=0.02))
    assert sweep.knee_per_s is not None
    tried = {probe.rate_per_s for probe in sweep.probes}
    for multiple in (1.25, 1.5, 2.0):
        assert any(rate == pytest.approx(multiple * sweep.knee_per_s, rel=0.021) for rate in tried)


async def test_both_ends_of_the_knee_were_found_so_twice() -> None:
    sweep = await _find(_queue(1, exponential=True), Search(Limits(e2e_s=8), start_per_s=0.2))
    for rate, verdict in ((sweep.knee_per_s, Verdict.GOOD), (sweep.bad_per_s, Verdict.BAD)):
        assert sum(probe.rate_per_s == rate and probe.verdict is verdict for probe in sweep.probes) >= 2


@pytest.mark.parametrize("lying", [1.0, 2.0, 4.0, 8.0, 6.0, 5.0])
async def test_one_probe_that_lies_does_not_move_the_knee(lying: float) -> None:
    seen: set[float] = set()

    def once_wrong(rate: float) -> Sequence[Record]:
        lie = rate == lying and rate not in seen
        seen.add(rate)
        return _steps(math.inf if lie and rate > 5.2 else 0.0 if lie else 5.2)(rate)

    sweep = await _find(once_wrong, Search(Limits(ttft_s=1), start_per_s=1, width=0.1))
    # A lie far from the border is believed: it is then the border, and the border is confirmed.
    assert sweep.found is Found.KNEE
    assert sweep.knee_per_s is not None and sweep.bad_per_s is not None
    assert sweep.knee_per_s <= 5.2 < sweep.bad_per_s


async def test_a_void_probe_is_repeated_and_says_nothing() -> None:
    left = {4.0: 2, 2.0: 1}

    def void(rate: float) -> tuple[str, ...]:
        left[rate] = left.get(rate, 0) - 1
        return ("send lag",) if left[rate] >= 0 else ()

    sweep = await _find(_steps(5.0), Search(Limits(ttft_s=1), start_per_s=1), void=void)
    assert sweep.found is Found.KNEE
    assert sweep.knee_per_s == pytest.approx(5, rel=0.1)
    assert sum(probe.verdict is Verdict.VOID for probe in sweep.probes) == 3


async def test_a_rate_that_stays_void_voids_the_sweep_after_a_bounded_number_of_probes() -> None:
    sweep = await _find(_steps(100.0), Search(Limits(ttft_s=1), start_per_s=1, max_void_repeats=2), void=lambda rate: ("CPU at 99 %",) if rate >= 8 else ())
    assert (sweep.found, sweep.knee_per_s) == (Found.VOID, None)
    assert sum(probe.rate_per_s == 8 for probe in sweep.probes) == 3
    assert "8 requests/s" in sweep.notes[0] and "CPU at 99 %" in sweep.notes[0]


async def test_a_void_probe_beyond_the_knee_leaves_the_knee_standing() -> None:
    sweep = await _find(_steps(5.0), Search(Limits(ttft_s=1), start_per_s=1), void=lambda rate: ("CPU at 99 %",) if rate > 8.5 else ())
    assert sweep.found is Found.KNEE
    assert sweep.knee_per_s == pytest.approx(5, rel=0.1)
    assert "beyond the knee" in sweep.notes[0]


@settings(max_examples=25, deadline=None)
@given(limit=st.integers(1, 12), seed=st.integers(0, 1000))
async def test_never_more_probes_than_allowed(limit: int, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def fickle(rate: float) -> Sequence[Record]:
        return _steps(math.inf if rng.random() < 0.5 else 0.0)(rate)

    sweep = await _find(fickle, Search(Limits(ttft_s=1), max_probes=limit))
    assert len(sweep.probes) <= limit


async def test_what_load_raises_comes_through() -> None:
    async def load(rate: float) -> Run:
        raise ConnectionError(f"at {rate}")

    with pytest.raises(ConnectionError):
        await find_knee(load, Search(Limits(ttft_s=1)))


async def test_a_sweep_comes_back_from_json() -> None:
    sweep = await _find(_queue(3, exponential=True), Search(Limits(e2e_s=8), start_per_s=0.2), void=lambda rate: ())
    again = Sweep.from_json(json.loads(json.dumps(sweep.to_json())), [probe.run for probe in sweep.probes])
    assert again == sweep


def test_a_backlog_makes_a_rate_bad_though_every_limit_is_met() -> None:
    records = queue_records(1.5, 600, np.random.default_rng(0))
    probe = judge(1.5, run_of(records), Search(Limits()))
    assert (probe.verdict, probe.attainment.value) == (Verdict.BAD, 1.0)
    assert "pile up" in probe.reason and not probe.clear


@pytest.mark.parametrize(("field", "value"), [("start_per_s", 0), ("max_per_s", 0.5), ("width", 0), ("min_attainment", 1.5), ("max_probes", 0)])
def test_a_search_that_cannot_be_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field.split("_")[0]):
        Search(Limits(), **{field: value})  # type: ignore[arg-type]
