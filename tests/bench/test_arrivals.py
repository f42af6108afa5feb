"""Arrivals are of the distribution that their name says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.arrivals import Closed, Constant, Gamma, Poisson, TraceTimes, at_rate, loop_of
from bench.plan import Loop

_COUNT = 20_000
_KS = 1.63
"""Kolmogorov-Smirnov, times the root of the number of gaps: exceeded once in a hundred by the right distribution, and the seed is fixed."""


def _random(seed: int = 1) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _gaps(arrivals: Poisson | Gamma | Constant) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.diff([0.0, *arrivals.times(_COUNT, _random())])


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.sort(_gaps(Poisson(4.0)))
    expected = 1 - np.exp(-4.0 * gaps)
    found = np.arange(1, _COUNT + 1) / _COUNT
    assert np.abs(expected - found).max() < _KS / math.sqrt(_COUNT)


def test_gaps_of_another_distribution_would_be_found() -> None:
    gaps = np.sort(_gaps(Gamma(4.0, 1.2)))
    found = np.arange(1, _COUNT + 1) / _COUNT
    assert np.abs(1 - np.exp(-4.0 * gaps) - found).max() > 2 * _KS / math.sqrt(_COUNT)


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0, 5.0])
def test_gamma_gaps_have_the_rate_and_the_variation_that_were_asked_for(cv: float) -> None:
    gaps = _gaps(Gamma(10.0, cv))
    assert gaps.mean() == pytest.approx(0.1, rel=5 * cv / math.sqrt(_COUNT))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.12)


def test_constant_gaps_are_all_alike() -> None:
    assert Constant(4.0).times(3, _random()) == pytest.approx([0.25, 0.5, 0.75])


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    assert at_rate(2.0) == Poisson(2.0)
    assert at_rate(2.0, 0.25) == Gamma(2.0, 2.0)
    assert at_rate(2.0, math.inf) == Constant(2.0)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.nan)])
def test_rates_that_cannot_be_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        at_rate(rate, burstiness)


def test_each_says_who_decides_and_how() -> None:
    told = {str(each): loop_of(each) for each in (Poisson(2.5), Gamma(2.5, 3.0), Constant(2.0), TraceTimes(10.0), Closed(8))}
    assert told == {
        "poisson 2.5/s": Loop.OPEN,
        "gamma 2.5/s cv 3": Loop.OPEN,
        "constant 2/s": Loop.OPEN,
        "trace x10": Loop.OPEN,
        "concurrency 8": Loop.CLOSED,
    }
