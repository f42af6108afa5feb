"""What happened in a run, piece by piece of its time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.metrics import measured
from bench.percentiles import Floats
from bench.record import Outcome, Record
from bench.run import Run
from bench.stability import in_flight
from bench.throughput import steady_start_s

_NUM_PIECES = 120
_ROUND_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Means over pieces of equal length, warm-up included: it loads the server too."""

    piece_s: float
    edges: Floats
    scheduled_per_s: Floats
    ended_per_s: Floats
    """However they ended."""
    missed_per_s: Floats
    """Of those, what did not end well."""
    in_flight: Floats
    output_tokens_per_s: Floats
    steady: tuple[float, float] | None
    """The steady window of the figures; None where all was warm-up."""

    @property
    def middles(self) -> Floats:
        middles: Floats = (self.edges[1:] + self.edges[:-1]) / 2
        return middles


def timeline(run: Run) -> Timeline:
    """Of a run with at least one record."""
    records = run.records
    scheduled = np.array([record.scheduled_s for record in records])
    ended = np.array([record.ended_s for record in records])
    missed = np.array([record.outcome is not Outcome.OK for record in records])
    edges = _edges(float(scheduled.min()), float(max(ended.max(), scheduled.max())))
    piece_s = float(edges[1] - edges[0])

    def rate(times: Floats, weights: Floats | None = None) -> Floats:
        counts: Floats = np.histogram(times, edges, weights=weights)[0] / piece_s
        return counts

    at, tokens = _arrivals(records)
    figures = measured(records)
    steady = (steady_start_s(figures), max(record.scheduled_s for record in figures)) if figures else None
    return Timeline(piece_s, edges, rate(scheduled), rate(ended), rate(ended[missed]), in_flight(scheduled, ended, edges), rate(at, tokens), steady)


def _edges(first: float, last: float) -> Floats:
    least = max((last - first) / _NUM_PIECES, 1e-6)
    piece_s = next((each for each in _ROUND_S if each >= least), least)
    start = math.floor(first / piece_s) * piece_s
    return start + piece_s * np.arange(max(2, math.ceil((last - start) / piece_s + 1e-9) + 1), dtype=np.float64)


def _arrivals(records: Sequence[Record]) -> tuple[Floats, NDArray[np.float64]]:
    num = sum(len(record.arrived) for record in records)
    at = np.fromiter((each.at_s for record in records for each in record.arrived), np.float64, num)
    return at, np.fromiter((each.num_tokens for record in records for each in record.arrived), np.float64, num)
