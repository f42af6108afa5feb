"""The search for the knee: the highest rate that a server still serves well."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from bench.goodput import Limits, good, goodput
from bench.metrics import Times, measured
from bench.percentiles import Figure, Interval
from bench.run import Run
from bench.stability import Stability, stability

Load = Callable[[float], Awaitable[Run]]
"""Loads the server with so many requests a second in an open loop, for long enough to tell, and gives what came of it. Called again for a rate it
must draw other arrivals: repeats of one schedule repeat its chance too."""

_SAME_RATE = 0.02


class Verdict(StrEnum):
    """Of one probe."""

    GOOD = "good"
    BAD = "bad"
    VOID = "void"


class Found(StrEnum):
    """How a sweep ended."""

    KNEE = "knee"
    """Between two rates that are no further apart than the width."""
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
    """In all, repeats and void ones included."""
    beyond: tuple[float, ...] = (1.25, 1.5, 2.0)
    """Multiples of the knee that are run when it is found, to show what becomes of the server there."""

    def __post_init__(self) -> None:
        if not 0 < self.min_per_s <= self.start_per_s <= self.max_per_s < math.inf:
            raise ValueError(f"rates must be 0 < min {self.min_per_s} <= start {self.start_per_s} <= max {self.max_per_s}")
        if not 0 < self.width < 1:
            raise ValueError(f"width is a share between 0 and 1, got {self.width}")
        if not 0 < self.min_attainment <= 1:
            raise ValueError(f"min_attainment is a share above 0 and up to 1, got {self.min_attainment}")
        if self.max_void_repeats < 0 or self.max_probes < 1:
            raise ValueError(f"max_void_repeats must be 0 or more and max_probes 1 or more, got {self.max_void_repeats} and {self.max_probes}")


@dataclass(frozen=True, slots=True)
class Probe:
    """One run of a sweep."""

    rate_per_s: float
    run: Run
    verdict: Verdict
    attainment: Figure
    """NaN of a void one."""
    stability: Stability | None
    """None of a void one."""
    clear: bool
    """Far enough from the border to be believed at once: the interval of its attainment does not hold the least one."""
    reason: str
    """Why it is not good; empty: it is."""


@dataclass(frozen=True, slots=True)
class Sweep:
    search: Search
    found: Found
    knee_per_s: float | None
    """The highest rate that was found good; None unless the sweep ended with KNEE or ABOVE_MAX."""
    bad_per_s: float | None
    """The lowest rate above it that was found bad."""
    probes: tuple[Probe, ...]
    """In the order in which they ran."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """All but the probes' runs, which are written by themselves, in this order."""
        probes = [{**{name: value for name, value in _fields(probe).items() if name != "run"}, "label": probe.run.label} for probe in self.probes]
        return {
            "search": asdict(self.search),
            "found": self.found.value,
            "knee_per_s": self.knee_per_s,
            "bad_per_s": self.bad_per_s,
            "notes": list(self.notes),
            "probes": probes,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any], runs: Sequence[Run]) -> Self:
        """`runs`: the probes', in their order. Raises KeyError, TypeError or ValueError for what is no sweep."""
        search = {**fields["search"], "limits": Limits(**fields["search"]["limits"]), "beyond": tuple(fields["search"]["beyond"])}
        probes = tuple(_probe_of(each, run) for each, run in zip(fields["probes"], runs, strict=True))
        return cls(Search(**search), Found(fields["found"]), fields["knee_per_s"], fields["bad_per_s"], probes, tuple(fields["notes"]))


def _fields(probe: Probe) -> dict[str, Any]:
    steady = None if probe.stability is None else asdict(probe.stability)
    return {
        "rate_per_s": probe.rate_per_s,
        "verdict": probe.verdict.value,
        "attainment": asdict(probe.attainment),
        "stability": steady,
        "clear": probe.clear,
        "reason": probe.reason,
    }


def _probe_of(fields: dict[str, Any], run: Run) -> Probe:
    interval = fields["attainment"]["interval"]
    attainment = Figure(fields["attainment"]["value"], None if interval is None else Interval(**interval))
    steady = None if fields["stability"] is None else Stability(**fields["stability"])
    return Probe(fields["rate_per_s"], run, Verdict(fields["verdict"]), attainment, steady, fields["clear"], fields["reason"])


async def find_knee(load: Load, search: Search) -> Sweep:
    """Brackets by doubling or halving, bisects, confirms both ends, then runs beyond. Raises what `load` raises.

    One probe decides about a rate only when it is clear. Else, and always for the two rates between which the knee is told to be, two that agree
    decide, out of at most three; an end that is not confirmed changes sides and the search goes on. A void probe is repeated, and says nothing.
    """
    hunt = _Hunt(load, search)
    try:
        found = await hunt.bracket()
    except _VoidRateError as error:
        return hunt.sweep(Found.VOID, str(error))
    except _NoProbesLeftError as error:
        return hunt.sweep(Found.UNDECIDED, str(error))
    try:
        await hunt.go_beyond()
    except (_VoidRateError, _NoProbesLeftError) as error:
        return hunt.sweep(found, f"not run up to the end beyond the knee: {error}")
    return hunt.sweep(found)


def judge(rate_per_s: float, run: Run, search: Search) -> Probe:
    """What one run says about its rate."""
    if run.void:
        return Probe(rate_per_s, run, Verdict.VOID, Figure(math.nan), None, False, "; ".join(run.void))
    records = measured(run.records)
    if not records:
        return Probe(rate_per_s, run, Verdict.VOID, Figure(math.nan), None, False, "no request but the warm-up's")
    times = Times.of(records)
    attainment = goodput(search.limits, good(search.limits, times.ok, times.ttft_s, times.tpot_s, times.e2e_s), 1.0).attainment
    steady = stability(records)
    reasons = []
    if attainment.value < search.min_attainment:
        reasons.append(f"{attainment.value:.1%} of the requests met the limits, {search.min_attainment:.0%} must")
    if not steady.stable:
        reasons.append(f"requests pile up: {steady.growth_share:.0%} of those that come stay behind")
    span = attainment.interval
    sure = span is not None and not span.low <= search.min_attainment <= span.high
    # A slope alone is no clear word: some of them are chance.
    clear = sure and (steady.stable or attainment.value < search.min_attainment)
    return Probe(rate_per_s, run, Verdict.BAD if reasons else Verdict.GOOD, attainment, steady, clear, "; ".join(reasons))


class _VoidRateError(Exception):
    """A rate stayed void."""


class _NoProbesLeftError(Exception):
    """`max_probes` have run."""


class _Hunt:
    """The state of one search. On one event loop."""

    def __init__(self, load: Load, search: Search) -> None:
        self._load = load
        self._search = search
        self._probes: list[Probe] = []
        self._verdicts: dict[float, Verdict] = {}

    def sweep(self, found: Found, *notes: str) -> Sweep:
        known = found in (Found.KNEE, Found.ABOVE_MAX)
        bad = self._bad if found in (Found.KNEE, Found.BELOW_MIN) else None
        return Sweep(self._search, found, self._good if known else None, bad, tuple(self._probes), notes)

    @property
    def _bad(self) -> float | None:
        """The lowest bad rate that has no good one above it."""
        above = self._good or 0.0
        return min((rate for rate, verdict in self._verdicts.items() if verdict is Verdict.BAD and rate > above), default=None)

    @property
    def _good(self) -> float | None:
        return max((rate for rate, verdict in self._verdicts.items() if verdict is Verdict.GOOD), default=None)

    async def bracket(self) -> Found:
        search = self._search
        rate: float = search.start_per_s
        while True:
            await self._decide(rate)
            good_rate, bad_rate = self._good, self._bad
            if good_rate is None:
                assert bad_rate is not None
                if bad_rate > search.min_per_s:
                    rate = max(bad_rate / 2, search.min_per_s)
                elif await self._confirm(bad_rate) is Verdict.BAD:
                    return Found.BELOW_MIN
            elif bad_rate is None:
                if good_rate < search.max_per_s:
                    rate = min(good_rate * 2, search.max_per_s)
                elif await self._confirm(good_rate) is Verdict.GOOD:
                    return Found.ABOVE_MAX
            elif (bad_rate - good_rate) / bad_rate > search.width:
                rate = (good_rate + bad_rate) / 2
            elif await self._confirm(good_rate) is Verdict.GOOD and await self._confirm(bad_rate) is Verdict.BAD:
                return Found.KNEE

    async def go_beyond(self) -> None:
        """Up to the largest multiple, one probe each: what a server does there is shown and decides nothing."""
        knee = self._good
        if knee is None:
            return
        for rate in (min(knee * multiple, self._search.max_per_s) for multiple in self._search.beyond):
            if not any(abs(probe.rate_per_s - rate) <= _SAME_RATE * rate for probe in self._probes):
                await self._probe(rate)

    async def _decide(self, rate: float) -> None:
        if rate in self._verdicts:
            return
        probe = await self._probe(rate)
        if probe.clear:
            self._verdicts[rate] = probe.verdict
        else:
            await self._confirm(rate)

    async def _confirm(self, rate: float) -> Verdict:
        """Probes on until two agree, and lets them decide."""
        while True:
            said = [probe.verdict for probe in self._probes if probe.rate_per_s == rate]
            for verdict in (Verdict.GOOD, Verdict.BAD):
                if said.count(verdict) >= 2:
                    self._verdicts[rate] = verdict
                    return verdict
            await self._probe(rate)

    async def _probe(self, rate: float) -> Probe:
        """One that is not void."""
        for _ in range(1 + self._search.max_void_repeats):
            if len(self._probes) >= self._search.max_probes:
                raise _NoProbesLeftError(f"{self._search.max_probes} probes have run, no more are allowed")
            probe = judge(rate, await self._load(rate), self._search)
            self._probes.append(probe)
            if probe.verdict is not Verdict.VOID:
                return probe
        raise _VoidRateError(f"{rate:.4g} requests/s stayed void in {1 + self._search.max_void_repeats} probes: {probe.reason}")
