"""Intervals cover the truth as often as they say, also where one request has many values and where requests share a queue."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.goodput import Limits, parse_limits, wilson
from bench.percentiles import PERCENTILES, Distribution, Floats, distribution


def _of(values: Floats, owners: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None, seed: int = 0) -> Distribution:
    return distribution("x", values, np.arange(len(values)) if owners is None else owners, len(values), seed=seed)


def _covered(found: Distribution, mean: float, of_percent: dict[int, float]) -> dict[str, bool]:
    named = {"mean": (found.mean, mean), **{f"p{percent}": (found.percentile(percent), value) for percent, value in of_percent.items()}}
    return {name: figure.interval is not None and figure.interval.low <= truth <= figure.interval.high for name, (figure, truth) in named.items()}


def test_intervals_of_independent_requests_cover_a_known_distribution() -> None:
    rng = np.random.default_rng(1)
    truth = {percent: -math.log(1 - percent / 100) for percent in (50, 90, 95)}
    trials = [_covered(_of(rng.exponential(1, 800), seed=trial), 1.0, truth) for trial in range(150)]
    for name in trials[0]:
        assert np.mean([trial[name] for trial in trials]) >= 0.88, name


def test_intervals_of_gaps_cover_though_gaps_of_a_request_are_alike() -> None:
    rng = np.random.default_rng(2)
    owners = np.repeat(np.arange(200), 30)

    def trial(seed: int) -> bool:
        # Each request has a speed of its own; its gaps hardly differ.
        values = np.repeat(rng.uniform(1, 3, 200), 30) * rng.uniform(0.99, 1.01, len(owners))
        return _covered(_of(values, owners, seed), 2.0, {})["mean"]

    assert np.mean([trial(seed) for seed in range(150)]) >= 0.88


def test_intervals_are_as_wide_as_requests_that_follow_each_other_are_alike() -> None:
    rng = np.random.default_rng(3)
    walk = np.empty(2000)
    walk[0] = 0
    for index in range(1, len(walk)):
        walk[index] = 0.9 * walk[index - 1] + rng.normal()
    alike, shuffled = _of(walk).mean.interval, _of(rng.permutation(walk)).mean.interval
    assert alike is not None and shuffled is not None
    assert alike.high - alike.low > 2 * (shuffled.high - shuffled.low)


def test_binned_intervals_are_those_of_all_values() -> None:
    # Above some thousand values percentiles of resamples are told at bins; far below the bins' number they are exact.
    rng = np.random.default_rng(4)
    owners = np.repeat(np.arange(400), 50)
    values = rng.gamma(3, 1, len(owners))
    blocks = owners // 8
    drawn = np.random.default_rng(0).multinomial(50, np.full(50, 1 / 50), size=1000)
    brute = [np.percentile(np.repeat(values, weights[blocks]), PERCENTILES) for weights in drawn[:300]]
    for place, percent in enumerate(PERCENTILES):
        interval = _of(values, owners).percentile(percent).interval
        assert interval is not None
        low, high = np.percentile([each[place] for each in brute], (2.5, 97.5))
        assert interval.low == pytest.approx(low, rel=0.01)
        assert interval.high == pytest.approx(high, rel=0.01)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(0, 5))
def test_points_are_numpys_and_lie_within_their_intervals(values: list[float], missing: int) -> None:
    found = distribution("x", np.array(values), np.arange(len(values)), len(values) + missing, seed=0)
    for percent, figure in (*found.percentiles, (-1, found.mean)):
        truth = np.mean(values) if percent < 0 else np.percentile(values, percent)
        assert figure.value == pytest.approx(float(truth))
        assert figure.interval is None or figure.interval.low <= figure.value <= figure.interval.high
    padded = np.array(sorted(values) + [math.inf] * missing)
    for percent, value in found.of_all:
        place = percent / 100 * (len(padded) - 1)
        low, high = padded[math.floor(place)], padded[math.ceil(place)]
        assert value == (pytest.approx(low + (place % 1) * (high - low)) if math.isfinite(high) else math.inf)


def test_few_requests_have_no_interval_and_thin_tails_are_marked() -> None:
    few = _of(np.arange(8.0))
    assert few.mean.interval is None
    assert [figure.thin for _, figure in _of(np.arange(100.0)).percentiles] == [False, False, False, True]
    assert not _of(np.arange(500.0)).percentile(99).thin


def test_nothing_gives_nan() -> None:
    found = distribution("x", np.array([]), np.array([], dtype=np.int64), 3, seed=0)
    assert math.isnan(found.mean.value) and math.isnan(found.percentile(50).value)
    assert dict(found.of_all)[50] == math.inf


def test_wilsons_interval_says_something_at_both_ends() -> None:
    share, interval = wilson(50, 50)
    assert share == 1 and interval is not None and interval.high == 1
    assert interval.low == pytest.approx(0.9287, abs=1e-4)
    assert wilson(0, 0)[1] is None


def test_limits_are_read_and_bad_ones_named() -> None:
    assert parse_limits(["ttft=0.5,tpot=0.05", "e2e=10"]) == (Limits(0.5, 0.05), Limits(e2e_s=10))
    for text, part in (("itl=1", "itl"), ("ttft=x", "ttft"), ("ttft=1,ttft=2", "twice"), ("ttft=-1", "ttft_s"), ("", "none of")):
        with pytest.raises(ValueError, match=part):
            parse_limits([text])
