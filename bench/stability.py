"""Whether a server keeps up: whether the requests that are out become more and more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.percentiles import Floats
from bench.record import Record
from bench.throughput import steady_start_s

_NUM_SEGMENTS = 12
_MIN_REQUESTS = 20
_MAX_GROWTH = 0.05
_MAX_LAG = 0.05
_SURE = 2.23  # Student's t, 10 degrees of freedom, 97.5 %


@dataclass(frozen=True, slots=True)
class Stability:
    """Of the window from the end of the ramp to the last request's time."""

    stable: bool
    """False only when slope and lag both say so, and the slope is not chance."""
    num_in_flight: float
    """Mean."""
    growth_share: float
    """Requests that stay behind, of those that come: slope of what is in flight over the rate at which they come. 0: as many end as come."""
    lag_share: float
    """1 - ended / scheduled within the window: the same from its two ends alone."""


def stability(records: Sequence[Record]) -> Stability:
    """Of an open loop's records without the warm-up's, at least one. A request is in flight from its scheduled time on: one that was not sent yet waits too.

    A queue that wanders has a slope too; it is one only if it is beyond what twelve means of consecutive pieces leave to chance. Too few requests
    to tell count as stable.
    """
    start_s = np.array([record.scheduled_s for record in records])
    end_s = np.array([record.ended_s for record in records])
    first, last = steady_start_s(records), float(start_s.max())
    come = int(((start_s >= first) & (start_s <= last)).sum())
    if come < _MIN_REQUESTS or last <= first:
        return Stability(True, math.nan, 0.0, 0.0)
    ended = int(((end_s >= first) & (end_s <= last)).sum())
    edges = np.linspace(first, last, _NUM_SEGMENTS + 1)
    flying = in_flight(start_s, end_s, edges)
    slope, error = _slope((edges[1:] + edges[:-1]) / 2, flying)
    growth, lag = slope * (last - first) / come, 1 - ended / come
    stable = growth <= _MAX_GROWTH or lag <= _MAX_LAG or slope <= _SURE * error
    return Stability(stable, float(flying.mean()), growth, lag)


def in_flight(start_s: Floats, end_s: Floats, edges: Floats) -> Floats:
    """Mean number of requests that are out in each piece between two edges."""
    spent = [np.clip(np.minimum(end_s, high) - np.maximum(start_s, low), 0, None).sum() / (high - low) for low, high in itertools.pairwise(edges)]
    return np.array(spent)


def _slope(at: Floats, values: Floats) -> tuple[float, float]:
    """Least squares, and its standard error."""
    centred = at - at.mean()
    spread = float((centred**2).sum())
    slope = float((centred * values).sum()) / spread
    rest = values - values.mean() - slope * centred
    return slope, math.sqrt(float((rest**2).sum()) / (len(at) - 2) / spread)
