"""One run as a whole: what was asked for, what came of it, where it happened, and whether it can be trusted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.record import Record


@dataclass(frozen=True, slots=True)
class Sample:
    """The server's state at one moment, as it tells it itself."""

    at_s: float
    """Seconds from the start of the run."""
    num_running: int
    num_waiting: int
    kv_usage: float | None
    """0 to 1, of the fullest decode instance; None where it does not tell."""


@dataclass(frozen=True, slots=True)
class Generator:
    """How the load generator itself fared: a slow one makes a fast server look slow, or the other way round."""

    send_lag_p50_s: float
    send_lag_p99_s: float
    """Sent minus due; 0 in a closed loop."""
    cpu: float
    """Share of one core that all threads of the generator's process used, in the busiest ten seconds of the run: a long quiet end must not hide them."""
    num_late: int = 0
    """Requests that were sent more than the limit behind their time."""


@dataclass(frozen=True, slots=True)
class Run:
    """Result of one plan against one target. Written as JSON, its records as JSONL beside it."""

    label: str
    """What a report calls it."""
    target: str
    """Kind and address: tandem 127.0.0.1:50051."""
    plan: dict[str, Any]
    """The plan's stated parts: workload, loop, arrivals, scale, seed, number of requests and of those the warm-up's."""
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    """From the first request's time to the end of the last one."""
    records: tuple[Record, ...]
    generator: Generator
    environment: dict[str, Any]
    """Versions, CPU or GPU, flags, the model's hash, cores per process."""
    samples: tuple[Sample, ...] = ()
    cold_start: dict[str, float] = field(default_factory=dict)
    """Measured apart, before the warm-up: seconds of the first request's TTFT and end."""
    void: tuple[str, ...] = ()
    """Why it cannot be trusted; empty: it can."""
