"""What a plan is like, in figures: whoever compares two results has to know that they were of the same load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bench.plan import Plan, PlannedRequest

_BLOCK = 16
"""Tokens to a block where hits of an endless prefix cache are counted."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class PlanStatistics:
    """Of the requests that count, without the warm-up."""

    num_requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    rate_per_s: float | None
    """None in a closed loop, as all that follows about times."""
    gap_cv: float | None
    """Standard deviation of the gaps over their mean: 1 for Poisson, more for bursts."""
    dispersion_1s: float | None
    """Variance over mean of the arrivals in a second: 1 for Poisson, more for bursts."""
    dispersion_10s: float | None
    shared_token_ratio: float
    """Share of prompt tokens that an endless prefix cache would have, in blocks of 16 tokens."""

    def to_json(self) -> dict[str, object]:
        """Plain values of four digits, without those that there are none of."""
        return {
            name: {part: _rounded(each) for part, each in value.items()} if isinstance(value, dict) else _rounded(value)
            for name, value in asdict(self).items()
            if value is not None
        }


def statistics_of(plan: Plan) -> PlanStatistics:
    """Looks at each token once. Raises ValueError for a plan in which nothing counts."""
    counted = [request for request in plan.requests if not request.warm_up]
    if not counted:
        raise ValueError("no request of the plan counts")
    times = np.array([request.due_s for request in counted if request.due_s is not None])
    return PlanStatistics(
        len(counted),
        _lengths([len(request.prompt_token_ids) for request in counted]),
        _lengths([request.max_tokens for request in counted]),
        _rate(times),
        _gap_cv(times),
        dispersion(times, 1.0),
        dispersion(times, 10.0),
        shared_token_ratio(counted),
    )


def dispersion(times: np.ndarray[tuple[int], np.dtype[np.float64]], window_s: float) -> float | None:
    """Variance over mean of the number of arrivals in whole windows; None when there are fewer than two of them."""
    num_windows = math.floor((times[-1] - times[0]) / window_s) if len(times) else 0
    if num_windows < 2:
        return None
    places = np.floor((times - times[0]) / window_s).astype(int)
    counts = np.bincount(places[places < num_windows], minlength=num_windows)
    return float(counts.var() / counts.mean()) if counts.any() else None


def shared_token_ratio(requests: Sequence[PlannedRequest]) -> float:
    """Prompt tokens whose whole prefix was in an earlier prompt, in blocks, over all."""
    seen: set[tuple[int, bytes]] = set()
    num_shared = num_tokens = 0
    for request in requests:
        ids = np.asarray(request.prompt_token_ids, np.uint32)
        parent, hits = 0, True
        for start in range(0, len(ids) - _BLOCK + 1, _BLOCK):
            key = (parent, ids[start : start + _BLOCK].tobytes())
            hits = hits and key in seen
            num_shared += _BLOCK if hits else 0
            seen.add(key)
            parent = hash(key)
        num_tokens += len(ids)
    return num_shared / num_tokens


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _lengths(values: Sequence[int]) -> Lengths:
    found = np.array(values)
    p50, p90, p99 = (float(np.percentile(found, share)) for share in (50, 90, 99))
    return Lengths(float(found.mean()), p50, p90, p99, float(found.max()))


def _rate(times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float | None:
    return float((len(times) - 1) / (times[-1] - times[0])) if len(times) > 1 and times[-1] > times[0] else None


def _gap_cv(times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float | None:
    gaps = np.diff(times)
    return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None
