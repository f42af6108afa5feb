"""The figures that a run should have, from what the server noted, and what is wrong with those that it has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.goodput import Limits
from bench.metrics import Summary, summarize
from bench.percentiles import PERCENTILES, Distribution
from bench.record import Outcome, Record
from checks.bench_delays import Kind, key_of
from checks.bench_load import Loaded
from checks.bench_server import Served

SHARE, LEAST_S = 0.02, 0.001
"""A figure may be off by 2 %, or by 1 ms where that is more."""
LIMITS = Limits(ttft_s=0.1)
_OUTCOMES: Mapping[Kind, Outcome] = {
    Kind.GOOD: Outcome.OK,
    Kind.REFUSED: Outcome.REFUSED,
    Kind.FAILED_FIRST: Outcome.FAILED,
    Kind.FAILED_LATE: Outcome.FAILED,
    Kind.SHORT: Outcome.WRONG,
    Kind.LONG: Outcome.WRONG,
    Kind.FALSE_USAGE: Outcome.WRONG,
    Kind.STOPPED: Outcome.WRONG,
}

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pair:
    """A request from both ends."""

    record: Record
    served: Served
    scheduled_s: float
    """time.monotonic(); in a closed loop, where nothing is due, when it was sent."""

    @property
    def ttft_s(self) -> float:
        return self.served.sent_s[0] - self.scheduled_s


def pairs(loaded: Loaded) -> list[Pair]:
    """Without the warm-up. Raises KeyError for a request that the server never had."""
    found = []
    for record in loaded.run.records:
        if not record.warm_up:
            served = loaded.served[key_of(loaded.plan.requests[record.index].prompt_token_ids)]
            found.append(Pair(record, served, loaded.start_s + record.scheduled_s))
    return found


def off(measured_s: float, true_s: float) -> bool:
    """Further than a figure may be."""
    return not abs(measured_s - true_s) <= max(LEAST_S, SHARE * abs(true_s))


def true_figures(among: list[Pair]) -> dict[str, Floats]:
    """All values of the requests that ended well, by figure."""
    good = [pair for pair in among if pair.served.kind is Kind.GOOD]
    return {
        "TTFT": np.array([pair.ttft_s for pair in good]),
        "ITL": np.concatenate([np.diff(pair.served.sent_s) for pair in good]),
        "TPOT": np.array([(pair.served.sent_s[-1] - pair.served.sent_s[0]) / (len(pair.served.sent_s) - 1) for pair in good]),
        "E2E": np.array([pair.served.ended_s - pair.scheduled_s for pair in good]),
    }


@dataclass(frozen=True, slots=True)
class Held:
    """A run's figures held against the truth."""

    wrong: tuple[str, ...]
    worst_s: float
    """The furthest that a percentile or a mean is off."""
    apart_s: float
    """Median over requests: how much later a first token was seen than sent."""


def hold(loaded: Loaded) -> Held:
    """Every percentile and mean, and request by request."""
    among, summary = pairs(loaded), summarize(loaded.run, [LIMITS])
    wrong, worst_s = [], 0.0
    for name, values in true_figures(among).items():
        found = next(each for each in summary.latencies if each.name == name)
        for figure, measured_s, true_s in _compared(found, values):
            worst_s = max(worst_s, abs(measured_s - true_s))
            if off(measured_s, true_s):
                wrong.append(f"{name} {figure} is {measured_s * 1e3:.2f} ms, the truth is {true_s * 1e3:.2f} ms")
    seen = [pair.record.arrived[0].at_s + loaded.start_s - pair.served.sent_s[0] for pair in among if pair.served.kind is Kind.GOOD and pair.record.arrived]
    apart_s = float(np.median(seen)) if seen else math.nan
    if not 0.0 <= apart_s <= LEAST_S:
        wrong.append(f"half of the first tokens are seen {apart_s * 1e3:.2f} ms after they were sent")
    on_its_way_s = float(np.median([pair.served.received_s - pair.record.sent_s - loaded.start_s for pair in among]))
    if not 0.0 <= on_its_way_s <= LEAST_S:
        wrong.append(f"half of the requests come in {on_its_way_s * 1e3:.2f} ms after the time that stands for their sending")
    return Held((*wrong, *_wrong_outcomes(among, summary)), worst_s, apart_s)


def _compared(found: Distribution, values: Floats) -> Iterator[tuple[str, float, float]]:
    yield "mean", found.mean.value, float(values.mean())
    for percent in PERCENTILES:
        yield f"p{percent}", found.percentile(percent).value, float(np.percentile(values, percent))


def _wrong_outcomes(among: list[Pair], summary: Summary) -> Iterator[str]:
    expected = Counter(_OUTCOMES[pair.served.kind] for pair in among)
    for outcome, count in summary.counts.by_outcome:
        if count != expected[outcome]:
            yield f"{count} requests count as {outcome.value}, the server made it {expected[outcome]}"
    for pair in among:
        if pair.record.outcome is not _OUTCOMES[pair.served.kind]:
            yield f"request {pair.record.index} ({pair.served.kind}) counts as {pair.record.outcome.value}: {pair.record.error}"
    yield from _wrong_goodput(among, summary)
    share = sum(count for outcome, count in summary.counts.by_outcome if outcome is not Outcome.OK) / len(among)
    for percent, value in summary.ttft.of_all:
        if math.isinf(value) is not (percent / 100 > 1 - share):
            yield f"p{percent} of TTFT over all requests is {value}, and {share:.1%} of them missed"


def _wrong_goodput(among: list[Pair], summary: Summary) -> Iterator[str]:
    """A token is seen after it was sent, so what is good here is good there; and hardly less is."""
    assert LIMITS.ttft_s is not None
    good = [pair.ttft_s for pair in among if pair.served.kind is Kind.GOOD]
    most = sum(ttft_s <= LIMITS.ttft_s for ttft_s in good)
    least = sum(ttft_s <= LIMITS.ttft_s * (1 - SHARE) - LEAST_S for ttft_s in good)
    [found] = summary.goodput
    if not least <= found.num_good <= most:
        yield f"{found.num_good} requests kept {LIMITS}, the truth is {least} to {most}"
    if not abs(found.attainment.value - found.num_good / len(among)) < 1e-9:
        yield f"attainment is {found.attainment.value:.3f} with {found.num_good} of {len(among)} requests: a miss is left out"
