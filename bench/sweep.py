"""The search for the knee: the highest rate that a server still serves well."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from bench.goodput import Limits
from bench.run import Run
from bench.stability import Stability

Load = Callable[[float], Awaitable[Run]]
"""Loads the server with so many requests a second in an open loop, for long enough to tell, and gives what came of it. Called again for a rate it
must draw other arrivals: repeats of one schedule repeat its chance too."""


class Verdict(StrEnum):
    """Of one probe."""

    GOOD = "good"
    BAD = "bad"
    VOID = "void"


class Found(StrEnum):
    """Of a sweep."""

    KNEE = "knee"
    """Found between two rates that are no further apart than the width."""
    ABOVE_MAX = "above max"
    """Good at the highest rate that may be tried."""
    BELOW_MIN = "below min"
    """Bad at the lowest one."""
    UNDECIDED = "undecided"
    """The number of probes ran out first."""
    VOID = "void"
    """A rate stayed void however often it was tried."""


@dataclass(frozen=True, slots=True)
class Search:
    """What is looked for, and how long."""

    limits: Limits
    start_per_s: float = 1.0
    """Rate of the first probe."""
    min_per_s: float = 0.01
    max_per_s: float = 1000.0
    width: float = 0.1
    """Good and bad may be this far apart, as a share of the bad one."""
    min_attainment: float = 0.9
    max_void_repeats: int = 2
    """So often is a void probe tried again."""
    max_probes: int = 40
    beyond: tuple[float, ...] = (1.25, 1.5, 2.0)
    """Multiples of the knee that are run when it is found, to show what becomes of the server there."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One run of a sweep."""

    rate_per_s: float
    run: Run
    verdict: Verdict
    attainment: float
    stability: Stability | None
    """None of a void one."""
    reason: str
    """Why it is not good; empty: it is."""


@dataclass(frozen=True, slots=True)
class Sweep:
    search: Search
    found: Found
    knee_per_s: float | None
    """The highest rate that was found good; None: none was, or the sweep is void."""
    bad_per_s: float | None
    """The lowest rate above it that was found bad."""
    probes: tuple[Probe, ...]
    """In the order in which they ran."""
    notes: tuple[str, ...] = ()


async def find_knee(load: Load, search: Search) -> Sweep:
    """Bracket by doubling, bisect, confirm both ends, run beyond. Never more than `max_probes` probes; raises what `load` raises."""
    raise NotImplementedError
