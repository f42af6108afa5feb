"""A plan made of a workload, arrivals, a scale and a seed: the same ones always make the same plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from bench.arrivals import Arrivals, Closed, TraceTimes, loop_of
from bench.plan import Plan, PlannedRequest
from bench.prompts import Prompts, Vocabulary
from bench.trace_files import Row
from bench.workloads import Workload, WorkloadError

MAX_REQUESTS = 1_000_000
"""Of a plan, all of which is in memory."""
MAX_PROMPT_TOKENS = 500_000_000
"""Of a plan; each takes four bytes."""
_MAX_DROPPED_IN_A_ROW = 10_000


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is sent. One of the two, or both: what is reached first. A replay of a trace ends with the trace, too."""

    num_requests: int | None = None
    """Without the warm-up."""
    duration_s: float | None = None
    """Seconds in which they are due, behind the warm-up; of an open loop."""
    num_warm_up: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """What the model can take."""

    vocabulary: Vocabulary
    scale: float = 1.0
    """Multiplies all lengths."""
    max_model_len: int | None = None
    """Tokens of prompt and output together: longer rows are left out, and the plan says how many."""


def plan_of(workload: Workload, arrivals: Arrivals, extent: Extent, fit: Fit, seed: int = 0) -> Plan:
    """Raises WorkloadError for what cannot be planned."""
    _check(workload, arrivals, extent, fit)
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 2))))
    rows = _Rows(_source(workload, arrivals, random), workload, fit)
    taken, times = _timed(rows, arrivals, extent, random)
    num_prompt_tokens = sum(row.prompt_tokens for row in taken)
    if num_prompt_tokens > MAX_PROMPT_TOKENS:
        raise WorkloadError(f"the prompts have {num_prompt_tokens} tokens, a plan at most {MAX_PROMPT_TOKENS}: give a smaller scale, or fewer requests")
    prompts = Prompts(fit.vocabulary, seed, rows.block_tokens)
    requests = tuple(
        PlannedRequest(index, prompts.prompt(index, row.prompt_tokens, row.hash_ids), row.output_tokens, time, index < extent.num_warm_up)
        for index, (row, time) in enumerate(zip(taken, times, strict=True))
    )
    concurrency = arrivals.concurrency if isinstance(arrivals, Closed) else None
    return Plan(requests, loop_of(arrivals), " ".join([workload.name, *rows.remarks()]), str(arrivals), fit.scale, seed, concurrency)


def _source(workload: Workload, arrivals: Arrivals, random: np.random.Generator) -> Iterator[Row]:
    if not isinstance(arrivals, TraceTimes):
        return workload.rows(random, from_start=False)
    # Once: a second lap would have to make up a gap between the two.
    return islice(workload.rows(random, from_start=True), workload.num_timed_rows)


class _Rows:
    """A workload's rows as they will be sent: scaled, and only those that fit."""

    def __init__(self, rows: Iterator[Row], workload: Workload, fit: Fit) -> None:
        self.num_dropped = 0
        self.end_s = math.inf
        """By the rows' own times: those from it on are neither sent nor counted."""
        self.block_tokens = max(round(workload.block_tokens * fit.scale), 1) if workload.block_tokens else 0
        self._rows = rows
        self._fit = fit
        # Blocks are whole numbers of tokens, so what is made of blocks is scaled as they are.
        self._prompt_scale = self.block_tokens / workload.block_tokens if workload.block_tokens else fit.scale

    def __iter__(self) -> Iterator[Row]:
        num_in_a_row = 0
        for row in self._rows:
            if row.at_s is not None and row.at_s >= self.end_s:
                return
            scaled = self._scaled(row)
            if self._fit.max_model_len is None or scaled.prompt_tokens + scaled.output_tokens <= self._fit.max_model_len:
                num_in_a_row = 0
                yield scaled
                continue
            self.num_dropped += 1
            num_in_a_row += 1
            if num_in_a_row == _MAX_DROPPED_IN_A_ROW:
                raise WorkloadError(
                    f"{num_in_a_row} rows one behind the other are longer than the model's {self._fit.max_model_len} tokens: give a smaller scale"
                )

    def remarks(self) -> Iterator[str]:
        """What the name of the workload and the scale do not say."""
        if self.block_tokens and not math.isclose(self._prompt_scale, self._fit.scale):
            yield f"(prompts x{self._prompt_scale:.4g}, in whole blocks of {self.block_tokens})"
        if self.num_dropped:
            rows = "row" if self.num_dropped == 1 else "rows"
            yield f"({self.num_dropped} {rows} longer than {self._fit.max_model_len} tokens left out)"

    def _scaled(self, row: Row) -> Row:
        prompt, output = max(round(row.prompt_tokens * self._prompt_scale), 1), max(round(row.output_tokens * self._fit.scale), 1)
        num_blocks = -(-prompt // self.block_tokens) if row.hash_ids else 0
        return Row(prompt, output, row.at_s, row.hash_ids[:num_blocks])


def _check(workload: Workload, arrivals: Arrivals, extent: Extent, fit: Fit) -> None:
    if not (fit.scale > 0 and math.isfinite(fit.scale)):
        raise WorkloadError(f"the scale must be above 0, is {fit.scale:g}")
    if isinstance(arrivals, TraceTimes) and not workload.num_timed_rows:
        raise WorkloadError(f"{workload.name} has no times of its own: give a rate or a concurrency")
    if extent.num_requests is None and (extent.duration_s is None or isinstance(arrivals, Closed)):
        raise WorkloadError("give a number of requests: a closed loop has no times that a duration could bound")
    if extent.num_requests is not None and extent.num_requests + extent.num_warm_up > MAX_REQUESTS:
        raise WorkloadError(f"a plan has at most {MAX_REQUESTS} requests")


def _timed(rows: _Rows, arrivals: Arrivals, extent: Extent, random: np.random.Generator) -> tuple[list[Row], list[float] | list[None]]:
    """Rows and when they are due."""
    count = MAX_REQUESTS if extent.num_requests is None else extent.num_requests + extent.num_warm_up
    if isinstance(arrivals, Closed):
        taken = list(islice(rows, count))
        return taken, [None] * len(taken)
    if isinstance(arrivals, TraceTimes):
        return _replayed(rows, count, extent, arrivals.speed)
    times = list(arrivals.times(_most(arrivals.rate_per_s, count, extent), random))
    kept = _within(times, extent)
    return list(islice(rows, kept)), times[:kept]


def _replayed(rows: _Rows, count: int, extent: Extent, speed: float) -> tuple[list[Row], list[float]]:
    """The trace from its first row that fits; those left out leave their gaps."""
    taken: list[Row] = []
    for row in islice(rows, count):
        if len(taken) == extent.num_warm_up and extent.duration_s is not None:
            rows.end_s = (row.at_s or 0.0) + extent.duration_s * speed
        taken.append(row)
    if not taken:
        raise WorkloadError("no row of the trace fits the model: give a smaller scale")
    first = taken[0].at_s or 0.0
    return taken, [((row.at_s or 0.0) - first) / speed for row in taken]


def _most(rate_per_s: float, count: int, extent: Extent) -> int:
    """So many arrivals as can be needed: for a duration more than will be due in all but hopeless cases, and the check is on the times."""
    if extent.duration_s is None:
        return count
    expected = rate_per_s * extent.duration_s + extent.num_warm_up
    return min(count, MAX_REQUESTS, int(2 * expected + 200 * math.sqrt(expected) + 100))


def _within(times: list[float], extent: Extent) -> int:
    """How many are due within the duration, which begins with the first one behind the warm-up."""
    if extent.duration_s is None or len(times) <= extent.num_warm_up:
        return len(times)
    end_s = times[extent.num_warm_up] + extent.duration_s
    return int(np.searchsorted(times, end_s, side="left"))
