"""Goodput: the requests per second that met every limit. A request that was refused, failed or came out wrong met none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.percentiles import Figure, Interval

_Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to be good, in seconds; None: no limit. Times count from the schedule."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s), ("e2e_s", self.e2e_s)):
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise ValueError(f"{name} is a time limit and must be above 0, got {limit}")

    def __str__(self) -> str:
        parts = [f"{name} {_milliseconds(limit)}" for name, limit in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("E2E", self.e2e_s)) if limit is not None]
        return ", ".join(parts) or "no limit"


@dataclass(frozen=True, slots=True)
class Goodput:
    """What became of one set of limits."""

    limits: Limits
    num_good: int
    num_requests: int
    """All of the run but its warm-up, however they ended."""
    attainment: Figure
    """Share of the requests that are good; Wilson's interval, which says something at 0 and at 1 too."""
    per_s: Figure
    """Good requests a second of the run."""


def good(limits: Limits, ok: NDArray[np.bool_], ttft_s: NDArray[np.float64], tpot_s: NDArray[np.float64], e2e_s: NDArray[np.float64]) -> NDArray[np.bool_]:
    """One bool for each request. A request with one token has no TPOT (NaN) and keeps any limit on it."""
    kept = ok.copy()
    for limit, values in ((limits.ttft_s, ttft_s), (limits.e2e_s, e2e_s)):
        if limit is not None:
            kept &= values <= limit
    if limits.tpot_s is not None:
        kept &= ~(tpot_s > limits.tpot_s)
    return kept


def goodput(limits: Limits, kept: NDArray[np.bool_], duration_s: float) -> Goodput:
    """`kept` of `good`; `duration_s` from the first request's time to the last one's end."""
    num_good, num_requests = int(kept.sum()), len(kept)
    share, interval = wilson(num_good, num_requests)
    rate = num_requests / duration_s if duration_s > 0 else math.nan
    per_s = Figure(share * rate, None if interval is None else Interval(interval.low * rate, interval.high * rate))
    return Goodput(limits, num_good, num_requests, Figure(share, interval), per_s)


def wilson(num_good: int, num_requests: int) -> tuple[float, Interval | None]:
    """Share and its 95 % interval by Wilson's score; NaN and None of nothing."""
    if num_requests == 0:
        return math.nan, None
    share, z2 = num_good / num_requests, _Z_95 * _Z_95
    centre = (share + z2 / (2 * num_requests)) / (1 + z2 / num_requests)
    half = _Z_95 * math.sqrt(share * (1 - share) / num_requests + z2 / (4 * num_requests**2)) / (1 + z2 / num_requests)
    return share, Interval(max(0.0, min(centre - half, share)), min(1.0, max(centre + half, share)))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"


def parse_limits(texts: Sequence[str]) -> tuple[Limits, ...]:
    """Each as `ttft=0.5,tpot=0.05,e2e=10`, in seconds, in any order, at least one. Raises ValueError that names the part."""
    return tuple(_parse(text) for text in texts)


def _parse(text: str) -> Limits:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise ValueError(f"limits {text!r}: {name!r} is none of ttft, tpot, e2e")
        if f"{name}_s" in found:
            raise ValueError(f"limits {text!r}: {name} is there twice")
        try:
            found[f"{name}_s"] = float(value)
        except ValueError:
            raise ValueError(f"limits {text!r}: {name} must be a number of seconds, got {value!r}") from None
    return Limits(**found)
