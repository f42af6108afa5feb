"""The loads that every server gets, the same requests for each, and what of them is compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.arrivals import Closed
from bench.metrics import Times, measured
from bench.plan import Plan
from bench.prompts import Vocabulary
from bench.record import Outcome, Record
from bench.runner import RunLimits, Runner
from bench.schedule import Extent, Fit, plan_of
from bench.target import Target
from bench.throughput import throughput
from bench.workloads import workload_of
from checks.peers_servers import PeerError

_LIMITS = RunLimits(request_s=300.0, drain_s=300.0, sample_every_s=3600.0)
_MIN_WINDOW_TOKENS = 8
_WARM_UP_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class Reading:
    """One cell on one server. Of requests medians."""

    seconds: float
    """From the first request to the end of the last."""
    output_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    """As a request sees it: the prompts of others that are computed meanwhile included."""
    batch_tpot_ms: float
    """The same of the time alone in which all streams generate; NaN where that is too short to tell."""
    generator_cores: float
    """What the load generator took."""

    def row(self) -> dict[str, float]:
        """For a file."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Cell:
    """A closed loop of requests of one length."""

    name: str
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    num_requests: int
    figure: str
    """Field of Reading that is compared."""
    at_least: float | None = None
    """Goal of Tandem's figure over vLLM's; this or the other."""
    at_most: float | None = None

    def plan(self, vocab_size: int, seed: int) -> Plan:
        """No two prompts of any plan begin alike, so that no cache of prefixes can help."""
        lengths = workload_of("fixed", input_len=str(self.prompt_tokens), output_len=str(self.output_tokens))
        return plan_of(lengths, Closed(self.concurrency), Extent(num_requests=self.num_requests), Fit(Vocabulary(vocab_size)), seed)

    def is_met(self, ratio: float) -> bool:
        """Whether the goal is."""
        return ratio >= self.at_least if self.at_least is not None else ratio <= (self.at_most or 0.0)

    @property
    def goal(self) -> str:
        """In words."""
        return f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"


_RATE, _TTFT, _TPOT = "output_tokens_per_s", "ttft_ms", "batch_tpot_ms"
ONE = Cell("1 stream", 1, 256, 64, 4, _RATE, at_least=2.0)
EIGHT = Cell("8 streams", 8, 256, 64, 16, _RATE, at_least=1.5)
MANY = Cell("32 streams", 32, 256, 64, 64, _RATE, at_least=1.2)
PROMPT = Cell("prompt of 1,024", 1, 1024, 8, 5, _TTFT, at_most=1.0)
CONTEXT = Cell("8 streams at 2,048", 8, 2048, 64, 8, _TPOT, at_most=0.6)
CELLS = (ONE, EIGHT, MANY, PROMPT, CONTEXT)
QUICK_CELLS = (Cell("1 stream", 1, 256, 64, 1, _RATE, at_least=2.0), Cell("8 streams", 8, 256, 64, 8, _RATE, at_least=1.5))
_WARM_UP = (Cell("warm-up", 32, 256, 16, 32, _RATE), Cell("warm-up", 8, 2048, 4, 8, _RATE), Cell("warm-up", 1, 256, 16, 2, _RATE))
_QUICK_WARM_UP = (Cell("warm-up", 8, 256, 4, 8, _RATE),)


async def warm_up(target: Target, vocab_size: int, seed: int, *, short: bool) -> None:
    """All kinds of steps once, in no figure. Raises PeerError."""
    for place, cell in enumerate(_QUICK_WARM_UP if short else _WARM_UP):
        await measure(cell, target, vocab_size, _WARM_UP_SEED + len(_WARM_UP) * seed + place)


async def measure(cell: Cell, target: Target, vocab_size: int, seed: int) -> Reading:
    """The target is open. Raises PeerError unless every request was answered with as many tokens as were asked for."""
    found = await Runner(cell.plan(vocab_size, seed), target, _LIMITS, cold_start=False).run()
    bad = [f"{record.outcome.value}: {record.error}" for record in found.records if record.outcome is not Outcome.OK]
    if bad or found.void:
        raise PeerError(f"{cell.name} on {target.name}: {'; '.join([*found.void, *bad[:3]])} ({len(bad)} of {len(found.records)} requests)")
    if any(record.num_cached_tokens for record in found.records):
        raise PeerError(f"{cell.name} on {target.name}: a prompt was found in a cache of prefixes")
    return reading(measured(found.records), found.generator.cpu)


def reading(records: Sequence[Record], generator_cores: float) -> Reading:
    """Of requests that all ended well."""
    times = Times.of(records)
    return Reading(
        seconds=max(record.ended_s for record in records) - min(record.sent_s for record in records),
        output_tokens_per_s=throughput(records).whole.output_tokens_per_s,
        ttft_ms=statistics.median(times.ttft_s.tolist()) * 1e3,
        tpot_ms=statistics.median(times.tpot_s.tolist()) * 1e3,
        batch_tpot_ms=batch_tpot_s(records) * 1e3,
        generator_cores=generator_cores,
    )


def batch_tpot_s(records: Sequence[Record]) -> float:
    """Median TPOT between the last first token and the first end; NaN when a stream has fewer than 8 tokens there."""
    start_s = max(record.arrived[0].at_s for record in records)
    end_s = min(record.arrived[-1].at_s for record in records)
    found = []
    for record in records:
        inside = [each for each in record.arrived if start_s <= each.at_s <= end_s]
        num_tokens = sum(each.num_tokens for each in inside[1:])
        if num_tokens < _MIN_WINDOW_TOKENS:
            return float("nan")
        found.append((inside[-1].at_s - inside[0].at_s) / num_tokens)
    return statistics.median(found)
