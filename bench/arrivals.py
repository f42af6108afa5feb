"""When requests are sent. All times are drawn ahead, from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from bench.plan import Loop


@dataclass(frozen=True, slots=True)
class Poisson:
    """Open loop: requests that know nothing of each other."""

    rate_per_s: float

    def __str__(self) -> str:
        return f"poisson {self.rate_per_s:g}/s"

    def times(self, count: int, random: np.random.Generator) -> Sequence[float]:
        """Seconds from the start, ascending."""
        return _cumulated(random.exponential(1 / self.rate_per_s, count))


@dataclass(frozen=True, slots=True)
class Gamma:
    """Open loop: gaps of a gamma distribution. A coefficient of variation above 1 makes bursts, below 1 an even stream; 1 is Poisson."""

    rate_per_s: float
    cv: float

    def __str__(self) -> str:
        return f"gamma {self.rate_per_s:g}/s cv {self.cv:g}"

    def times(self, count: int, random: np.random.Generator) -> Sequence[float]:
        """Seconds from the start, ascending."""
        shape = self.cv**-2
        return _cumulated(random.gamma(shape, 1 / (shape * self.rate_per_s), count))


@dataclass(frozen=True, slots=True)
class Constant:
    """Open loop: one gap for all."""

    rate_per_s: float

    def __str__(self) -> str:
        return f"constant {self.rate_per_s:g}/s"

    def times(self, count: int, random: np.random.Generator) -> Sequence[float]:
        """Seconds from the start, ascending."""
        return _cumulated(np.full(count, 1 / self.rate_per_s))


@dataclass(frozen=True, slots=True)
class TraceTimes:
    """Open loop: the workload's own times, so many times as fast."""

    speed: float = 1.0

    def __str__(self) -> str:
        return f"trace x{self.speed:g}"


@dataclass(frozen=True, slots=True)
class Closed:
    """Closed loop: so many requests are always out. It waits with a server that stalls, and so hides what its clients would feel."""

    concurrency: int

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


Drawn: TypeAlias = Poisson | Gamma | Constant
Arrivals: TypeAlias = Drawn | TraceTimes | Closed


def loop_of(arrivals: Arrivals) -> Loop:
    """Who decides when a request is sent."""
    return Loop.CLOSED if isinstance(arrivals, Closed) else Loop.OPEN


def at_rate(rate_per_s: float, burstiness: float = 1.0) -> Drawn:
    """By the shape of gamma-distributed gaps, as `vllm bench serve` names it: 1 is Poisson, less makes bursts, infinite is constant. Raises ValueError."""
    if not (rate_per_s > 0 and np.isfinite(rate_per_s)):
        raise ValueError(f"the rate must be above 0 and finite, is {rate_per_s:g}")
    if not burstiness > 0:
        raise ValueError(f"burstiness must be above 0, is {burstiness:g}")
    if np.isinf(burstiness):
        return Constant(rate_per_s)
    return Poisson(rate_per_s) if burstiness == 1.0 else Gamma(rate_per_s, float(burstiness**-0.5))


def _cumulated(gaps: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Sequence[float]:
    times: list[float] = np.cumsum(gaps).tolist()
    return times
