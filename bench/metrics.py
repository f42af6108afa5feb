"""A run's figures, made of its records alone. docs/benchmarking.md has the definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.cost import Cost, Price, cost
from bench.goodput import Goodput, Limits, good, goodput
from bench.percentiles import Distribution, Floats, distribution
from bench.record import Outcome, Record
from bench.run import Run
from bench.throughput import Throughput, throughput

_SEED = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests of the run but its warm-up, by how they ended."""

    num_requests: int
    num_warm_up: int
    """Sent, checked, and in no figure."""
    by_outcome: tuple[tuple[Outcome, int], ...]
    """All outcomes, those that did not occur too."""
    reasons: tuple[tuple[Outcome, str, int], ...]
    """Of what did not end well: outcome, error, how many; the most frequent first."""

    def of(self, outcome: Outcome) -> int:
        return dict(self.by_outcome)[outcome]

    @property
    def num_missed(self) -> int:
        return self.num_requests - self.of(Outcome.OK)


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of a run; seconds and tokens."""

    label: str
    counts: Counts
    ttft: Distribution
    """From the scheduled time to the first message with tokens."""
    ttft_sent: Distribution
    """The same from when it was sent."""
    tpot: Distribution
    """(last message - first message) / (tokens - 1), one value for a request of two tokens or more."""
    itl: Distribution
    """Every gap between two messages of a request, whatever number of tokens the later one has: what a reader waits for."""
    e2e: Distribution
    """From the scheduled time to the end of the answer."""
    e2e_sent: Distribution
    tokens_per_message: Distribution
    """1 where each token comes by itself. Above it ITL is a gap between groups, and TPOT the one to compare."""
    throughput: Throughput
    goodput: tuple[Goodput, ...]
    """In the order of the limits that were given."""
    cost: Cost | None
    """At the steady rate; None without a price."""

    @property
    def latencies(self) -> tuple[Distribution, ...]:
        """From the schedule: TTFT, TPOT, ITL, E2E."""
        return self.ttft, self.tpot, self.itl, self.e2e

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, text, lists and dicts; a figure that does not exist is NaN, one that was never reached is infinite."""
        return asdict(self)


def measured(records: Sequence[Record]) -> tuple[Record, ...]:
    """All but the warm-up, in the order of the schedule."""
    return tuple(sorted((record for record in records if not record.warm_up), key=lambda record: (record.scheduled_s, record.index)))


def summarize(run: Run, limits: Sequence[Limits] = (), price: Price | None = None) -> Summary:
    """Figures of one run. Raises ValueError for a run without a record outside its warm-up.

    The same run gives the same figures: intervals are drawn with a seed of their own.
    """
    records = measured(run.records)
    if not records:
        raise ValueError(f"run {run.label!r} has no record but its warm-up's: there is nothing to make a figure of")
    times = Times.of(records)
    rates = throughput(records)
    whole_s = rates.whole.end_s - rates.whole.start_s
    kept = [good(each, times.ok, times.ttft_s, times.tpot_s, times.e2e_s) for each in limits]

    def of_requests(name: str, values: Floats, *, never: bool = False) -> Distribution:
        there = np.flatnonzero(times.ok & ~np.isnan(values))
        return distribution(name, values[there], there, len(records), seed=_SEED, never=never)

    return Summary(
        label=run.label,
        counts=_counts(run.records, records),
        ttft=of_requests("TTFT", times.ttft_s, never=True),
        ttft_sent=of_requests("TTFT from sent", times.ttft_s - times.lag_s),
        tpot=of_requests("TPOT", times.tpot_s),
        itl=distribution("ITL", times.gaps_s, times.gap_owners, len(records), seed=_SEED, never=False),
        e2e=of_requests("E2E", times.e2e_s, never=True),
        e2e_sent=of_requests("E2E from sent", times.e2e_s - times.lag_s),
        tokens_per_message=distribution("tokens per message", times.message_tokens, times.message_owners, len(records), seed=_SEED, never=False),
        throughput=rates,
        goodput=tuple(goodput(each, of, whole_s) for each, of in zip(limits, kept, strict=True)),
        cost=None if price is None else cost(price, *_paid(rates)),
    )


def _paid(rates: Throughput) -> tuple[float, float]:
    # A run with one request has no steady window: its whole length is all there is.
    window = rates.steady if rates.steady.end_s > rates.steady.start_s else rates.whole
    return window.prompt_tokens_per_s, window.output_tokens_per_s


def _counts(every: Sequence[Record], records: Sequence[Record]) -> Counts:
    outcomes = Counter(record.outcome for record in records)
    reasons = Counter((record.outcome, record.error) for record in records if record.outcome is not Outcome.OK)
    ordered = tuple((outcome, error, count) for (outcome, error), count in reasons.most_common())
    return Counts(len(records), len(every) - len(records), tuple((outcome, outcomes[outcome]) for outcome in Outcome), ordered)


@dataclass(frozen=True, slots=True)
class Times:
    """Records as arrays; NaN where a request has no such value. Gaps and messages are those of requests that ended well."""

    ok: NDArray[np.bool_]
    scheduled_s: Floats
    lag_s: Floats
    """Sent minus scheduled."""
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    gaps_s: Floats
    gap_owners: NDArray[np.int64]
    message_tokens: Floats
    message_owners: NDArray[np.int64]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Times:
        """`records` in the order of the schedule."""
        ok = np.array([record.outcome is Outcome.OK for record in records])
        scheduled = np.array([record.scheduled_s for record in records])
        sent = np.array([record.sent_s for record in records])
        ended = np.array([record.ended_s for record in records])
        first = np.array([record.arrived[0].at_s if record.arrived else np.nan for record in records])
        last = np.array([record.arrived[-1].at_s if record.arrived else np.nan for record in records])
        tokens = np.array([record.num_output_tokens for record in records], dtype=np.float64)
        tpot = np.where(tokens > 1, (last - first) / np.maximum(tokens - 1, 1), np.nan)
        well = [(place, record.arrived) for place, record in enumerate(records) if ok[place]]
        num_messages = sum(len(arrived) for _, arrived in well)
        at = np.fromiter((each.at_s for _, arrived in well for each in arrived), np.float64, num_messages)
        message_tokens = np.fromiter((each.num_tokens for _, arrived in well for each in arrived), np.float64, num_messages)
        owners = np.repeat(np.array([place for place, _ in well], dtype=np.int64), [len(arrived) for _, arrived in well])
        follows = owners[1:] == owners[:-1]
        gaps = np.diff(at)[follows]
        return cls(ok, scheduled, sent - scheduled, first - scheduled, tpot, ended - scheduled, gaps, owners[1:][follows], message_tokens, owners)
