"""Percentiles and means, with intervals that come from resampling whole requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PERCENTILES = (50, 90, 95, 99)
_NUM_RESAMPLES = 1000
_CONFIDENCE = 0.95
_MAX_BLOCKS = 2000
_MIN_BLOCKS = 5
_MIN_BEYOND = 5
_MAX_EXACT = 2048

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """95 % confidence."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a report."""

    value: float
    """NaN: there was nothing to make it of."""
    interval: Interval | None = None
    """None: there is none, or too little to tell it from."""
    thin: bool = False
    """A percentile with fewer than 5 values beyond it: it says little more than the maximum does."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one quantity over a run. Only requests that ended well are in it; how many those are, of how many, stands with it."""

    name: str
    num_values: int
    num_requests: int
    """Requests that gave a value."""
    num_all: int
    """Requests of the run but its warm-up, however they ended."""
    mean: Figure
    percentiles: tuple[tuple[int, Figure], ...]
    """Of PERCENTILES; between two values as numpy's default has it."""
    max: float
    of_all: tuple[tuple[int, float], ...] = ()
    """Of TTFT and E2E the same percentiles over all requests, one that gave no value as one that never got there: infinite."""

    def percentile(self, percent: int) -> Figure:
        """Raises KeyError for one that is not in PERCENTILES."""
        return dict(self.percentiles)[percent]


def distribution(name: str, values: Floats, owners: NDArray[np.int64], num_all: int, *, seed: int, never: bool = True) -> Distribution:
    """`owners`: for each value the index of its request, in the order of the schedule and not falling. `never`: also give the percentiles of all requests.

    Intervals are a percentile bootstrap, seeded, of blocks of requests that follow each other: gaps of one request are not independent, and neither
    are requests that stood in the same queue.
    """
    assert len(values) == len(owners)
    ranks = _ranks(owners)
    num_requests = int(ranks[-1]) + 1 if len(ranks) else 0
    ordered = np.sort(values)
    points = [float(values.mean()), *(float(point) for point in np.percentile(ordered, PERCENTILES))] if num_requests else [math.nan] * (len(PERCENTILES) + 1)
    intervals = _intervals(values, ordered, ranks, seed) if num_requests else None
    spans = [None] * len(points) if intervals is None else [_around(interval, point) for interval, point in zip(intervals, points, strict=True)]
    mean = Figure(points[0], spans[0])
    figures = []
    for percent, point, span in zip(PERCENTILES, points[1:], spans[1:], strict=True):
        figures.append((percent, Figure(point, span, thin=len(values) * (100 - percent) / 100 < _MIN_BEYOND)))
    of_all = tuple((percent, _of_all(ordered, num_all, percent)) for percent in PERCENTILES) if never else ()
    return Distribution(name, len(values), num_requests, num_all, mean, tuple(figures), float(ordered[-1]) if len(ordered) else math.nan, of_all)


def _of_all(ordered: Floats, num_all: int, percent: int) -> float:
    if num_all == 0:
        return math.nan
    place = percent / 100 * (num_all - 1)
    below, above = math.floor(place), math.ceil(place)
    if above >= len(ordered):
        return math.inf
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))


def _ranks(owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Owners numbered from 0 without a hole."""
    steps = np.diff(owners, prepend=owners[:1])
    assert not (steps < 0).any()
    return np.cumsum(steps > 0, dtype=np.int64)


def _blocks(ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each value the number of its block: the cube root of the requests in each, and no more than 2000 blocks, so that time stays bounded."""
    num_requests = int(ranks[-1]) + 1
    length = max(math.ceil(num_requests ** (1 / 3)), math.ceil(num_requests / _MAX_BLOCKS))
    blocks: NDArray[np.int64] = ranks // length
    return blocks


def _bins(ordered: Floats) -> tuple[Floats, bool]:
    """Values at which resampled percentiles are told: all of them where there are few, else some thousand, dense in the tail. The second: they are not all."""
    unlike = ordered[np.flatnonzero(np.diff(ordered, prepend=-math.inf) > 0)]
    if len(unlike) <= _MAX_EXACT:
        return unlike, False
    shares = np.concatenate([np.linspace(0, 1, _MAX_EXACT // 2 + 1), 1 - np.geomspace(1e-1, 1 / len(ordered), _MAX_EXACT // 4)])
    return np.unique(np.quantile(ordered, np.sort(shares), method="nearest")), True


def _reached(bins: Floats, reached: Floats, target: Floats, *, between: bool) -> Floats:
    """Of each row of counts at or below the bins, where it reaches its target."""
    rows = np.arange(len(reached))
    # The first bin with enough: argmax over bools stops at the first True.
    above = np.argmax(reached >= target[:, None] - 1e-6, axis=1)
    reached_at: Floats = bins[above]
    if not between:
        return reached_at
    below = np.maximum(above - 1, 0)
    step = np.maximum(reached[rows, above] - reached[rows, below], 1e-9)
    share = np.clip((target - reached[rows, below]) / step, 0, 1)
    within: Floats = bins[below] + share * (reached_at - bins[below])
    return within


def _intervals(values: Floats, ordered: Floats, ranks: NDArray[np.int64], seed: int) -> list[Interval] | None:
    """Of the mean, then of PERCENTILES; None when there are too few blocks to draw from."""
    blocks = _blocks(ranks)
    num_blocks = int(blocks[-1]) + 1
    if num_blocks < _MIN_BLOCKS:
        return None
    bins, between = _bins(ordered)
    cells = blocks * len(bins) + np.searchsorted(bins, values)
    counts = np.bincount(cells, minlength=num_blocks * len(bins)).reshape(num_blocks, len(bins)).astype(np.float32)
    sums = np.bincount(blocks, weights=values, minlength=num_blocks)
    drawn = np.random.default_rng(seed).multinomial(num_blocks, np.full(num_blocks, 1 / num_blocks), size=_NUM_RESAMPLES).astype(np.float32)
    reached = np.cumsum(drawn @ counts, axis=1, dtype=np.float64)
    totals = reached[:, -1]
    found = [drawn @ sums / totals, *(_reached(bins, reached, percent / 100 * totals, between=between) for percent in PERCENTILES)]
    tail = (1 - _CONFIDENCE) / 2 * 100
    return [Interval(*(float(limit) for limit in np.percentile(each, (tail, 100 - tail)))) for each in found]


def _around(interval: Interval, value: float) -> Interval:
    """A rounding error must not leave a figure beside its own interval."""
    return Interval(min(interval.low, value), max(interval.high, value))
