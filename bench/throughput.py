"""Rates of a run: over all of it, and while it was under its full load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.record import Outcome, Record

_RAMP_PERCENTILE = 90
_MAX_RAMP = 0.5


@dataclass(frozen=True, slots=True)
class Rates:
    """Over one window. Only requests that ended well give tokens; NaN in a window of no length."""

    start_s: float
    end_s: float
    requests_per_s: float
    """Requests that ended well."""
    prompt_tokens_per_s: float
    """A prompt counts when its first token comes: it has been computed then."""
    output_tokens_per_s: float

    @property
    def total_tokens_per_s(self) -> float:
        return self.prompt_tokens_per_s + self.output_tokens_per_s


@dataclass(frozen=True, slots=True)
class Throughput:
    asked_per_s: float
    """Requests by the schedule, from the first one's time to the last one's; in a closed loop, as they were sent. NaN of fewer than two."""
    whole: Rates
    """From the first request's time to the last one's end: what a batch job sees, its slow start and its last straggler included."""
    steady: Rates
    """From the end of the ramp to the last request's time: what a server under this load gives all day."""


def throughput(records: Sequence[Record]) -> Throughput:
    """Of records without the warm-up's; at least one."""
    scheduled = np.array([record.scheduled_s for record in records])
    first, last = float(scheduled.min()), float(scheduled.max())
    asked = (len(records) - 1) / (last - first) if last > first else math.nan
    well = [record for record in records if record.outcome is Outcome.OK and record.arrived]
    end = max(record.ended_s for record in records)
    return Throughput(asked, _rates(well, first, end), _rates(well, steady_start_s(records), last))


def steady_start_s(records: Sequence[Record]) -> float:
    """When about as many requests are out as will be later: p90 of E2E after the first one, but at most half the time in which requests come.

    Only E2E of the first quarter's requests counts: those that come later may stand in a queue that grows and grows.
    """
    scheduled = np.array([record.scheduled_s for record in records])
    first, last = float(scheduled.min()), float(scheduled.max())
    quarter = first + (last - first) / 4
    took = [record.ended_s - record.scheduled_s for record in records if record.outcome is Outcome.OK and record.scheduled_s <= quarter]
    ramp = float(np.percentile(took, _RAMP_PERCENTILE)) if took else 0.0
    return first + min(ramp, (last - first) * _MAX_RAMP)


def _rates(well: Sequence[Record], start_s: float, end_s: float) -> Rates:
    span = end_s - start_s
    if span <= 0:
        return Rates(start_s, end_s, math.nan, math.nan, math.nan)
    ended = np.array([record.ended_s for record in well])
    firsts = np.array([record.arrived[0].at_s for record in well])
    prompts = np.array([record.num_prompt_tokens for record in well], dtype=np.float64)
    requests = int(((ended >= start_s) & (ended <= end_s)).sum())
    prompt = float(prompts[(firsts >= start_s) & (firsts <= end_s)].sum()) if well else 0.0
    output = sum(_output_tokens(record, start_s, end_s) for record in well)
    return Rates(start_s, end_s, requests / span, prompt / span, output / span)


def _output_tokens(record: Record, start_s: float, end_s: float) -> float:
    if start_s <= record.arrived[0].at_s and record.arrived[-1].at_s <= end_s:
        return record.num_output_tokens
    told = sum(each.num_tokens for each in record.arrived)
    inside = sum(each.num_tokens for each in record.arrived if start_s <= each.at_s <= end_s)
    # What the messages say may differ from the usage, which stands: messages then only tell when.
    return record.num_output_tokens * inside / told
