"""Sends a plan's requests to a target, each at its time, and keeps what became of every one of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from bench.answer_check import what_is_wrong
from bench.generator_health import CpuMeter, generator_of, lag_limit_s, quiet_heap, void_reasons
from bench.plan import Loop, Plan, PlannedRequest
from bench.progress import Progress
from bench.record import Outcome, Record, one_line
from bench.run import Generator, Sample
from bench.target import Clock, Exchange, Target, TargetError

_LOG = logging.getLogger(__name__)
_MAX_ENCODED_BYTES = 1 << 30
"""Prompts beyond it are encoded when they are sent, and what that costs is in their send lag."""
_LEAVE_S = 10.0
_SAMPLE_TIMEOUT_S = 5.0
_COLD_INDEX = -1


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Bounds of a run, in seconds."""

    request_s: float = 300.0
    """From when a request is sent: what has not ended by then is TIMEOUT, and is left."""
    run_s: float = 3600.0
    """Nothing is sent after it. In an open loop that cuts the plan, and the run is void."""
    drain_s: float = 60.0
    """What is still out so long after the last request was sent is TIMEOUT."""
    cold_start_s: float = 600.0
    """Of the first request alone: a server may compile for it."""
    sample_every_s: float = 1.0
    ttft_limit_s: float | None = None
    """The strictest limit on TTFT that the run will be judged by: it says how late the generator may be."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run gave, without where it happened."""

    started_at: str
    """UTC, ISO 8601: when the first request of the plan could be due."""
    duration_s: float
    records: tuple[Record, ...]
    """By index, warm-up included."""
    generator: Generator
    samples: tuple[Sample, ...]
    cold_start: dict[str, float]
    void: tuple[str, ...]


def started_clock() -> Clock:
    """Starts now."""
    start = time.perf_counter()
    return lambda: time.perf_counter() - start


class Runner:
    """One run. `run` once, on one event loop; `cut` from the same loop ends it early and keeps what was measured."""

    def __init__(self, plan: Plan, target: Target, limits: RunLimits | None = None, progress: Progress | None = None, *, cold_start: bool = True) -> None:
        self._plan = plan
        self._target = target
        self._limits = limits or RunLimits()
        self._progress = progress or Progress()
        self._cold_start = cold_start
        self._clock: Clock = lambda: 0.0
        self._records: list[Record] = []
        self._samples: list[Sample] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._out: dict[int, tuple[PlannedRequest, Exchange]] = {}
        self._all_sent = asyncio.Event()
        self._idle = asyncio.Event()
        self._cut = asyncio.Event()
        self._end = (Outcome.FAILED, "cancelled")
        """What becomes of a request that the runner cancels."""

    def cut(self) -> None:
        """Ends the run now: nothing more is sent, what is out is left."""
        self._cut.set()

    async def run(self) -> Measured:
        """Cold start, warm-up, run and drain. The target is open. Raises TargetError when the cold start's request is not answered."""
        cold = await self._measure_cold_start() if self._cold_start and self._plan.requests and not self._cut.is_set() else {}
        bodies = self._encoded()
        self._progress.num_planned = len(self._plan.requests)
        with quiet_heap():
            self._clock = started_clock()
            started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
            meter = CpuMeter(self._clock)
            beside = [asyncio.create_task(meter.run()), asyncio.create_task(self._sample())]
            try:
                await self._load(bodies)
            finally:
                await _end_all(beside)
        return self._measured(started_at, cold, meter.busiest)

    # Ahead of the run

    async def _measure_cold_start(self) -> dict[str, float]:
        first = self._plan.requests[0]
        # The first prompt backwards: as long, of the same tokens, and in no prefix cache does it help a request of the plan.
        request = replace(first, index=_COLD_INDEX, prompt_token_ids=tuple(reversed(first.prompt_token_ids)), warm_up=True)
        clock, exchange = started_clock(), Exchange()
        sending = asyncio.create_task(self._target.send(request, self._target.encode(request), clock, exchange))
        ended = asyncio.Event()
        sending.add_done_callback(lambda _: ended.set())
        try:
            await self._first_of(ended, self._limits.cold_start_s)
        finally:
            await _end_all([sending])
        if self._cut.is_set():
            return {}
        if not ended.is_set() or sending.cancelled():
            raise TargetError(f"{self._target.name}: the first request had not ended after {self._limits.cold_start_s:g} s")
        sending.result()
        if exchange.outcome is not Outcome.OK or not exchange.arrived:
            raise TargetError(f"{self._target.name}: the first request was not answered: {exchange.error or 'no tokens'}")
        sent_s = exchange.sent_s or 0.0
        return {"ttft_s": exchange.arrived[0].at_s - sent_s, "e2e_s": (exchange.ended_s or clock()) - sent_s}

    def _encoded(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        room = _MAX_ENCODED_BYTES
        for request in self._plan.requests:
            body = self._target.encode(request)
            room -= len(body)
            if room < 0:
                break
            found[request.index] = body
        return found

    # The run

    async def _load(self, bodies: dict[int, bytes]) -> None:
        if self._cut.is_set():
            return
        sending = self._send_open if self._plan.loop is Loop.OPEN else self._send_closed
        sender = asyncio.create_task(sending(bodies))
        try:
            await self._first_of(self._all_sent, self._limits.run_s)
            if self._plan.loop is Loop.OPEN or self._cut.is_set():
                sender.cancel()
            self._all_sent.set()
            if self._tasks:
                await self._first_of(self._idle, self._limits.drain_s)
            drained = f"it had not ended {self._limits.drain_s:g} s after the last request was sent"
            self._end = (Outcome.FAILED, "the run was cut") if self._cut.is_set() else (Outcome.TIMEOUT, drained)
        finally:
            await _end_all([sender, *self._tasks])
            for request, exchange in list(self._out.values()):  # a target that does not let itself be cancelled hides no request
                self._give_up(exchange)
                self._note(request, exchange)

    async def _first_of(self, event: asyncio.Event, timeout_s: float) -> None:
        """Returns when the event is set, the run is cut, or the time is up."""
        waiters = [asyncio.create_task(each.wait()) for each in (event, self._cut)]
        try:
            await asyncio.wait(waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end_all(waiters)

    async def _send_open(self, bodies: dict[int, bytes]) -> None:
        for request in self._plan.requests:
            assert request.due_s is not None
            while (early_s := request.due_s - self._clock()) > 0:  # noqa: ASYNC110 - uvloop's timers count in milliseconds and may fire early
                await asyncio.sleep(early_s)
            self._spawn(self._one(request, bodies.pop(request.index, None)))
            await asyncio.sleep(0)  # it goes out now, also when many are due
        self._all_sent.set()

    async def _send_closed(self, bodies: dict[int, bytes]) -> None:
        waiting = iter(self._plan.requests)
        for _ in range(self._plan.concurrency or 1):
            self._spawn(self._work(waiting, bodies))

    async def _work(self, waiting: Iterator[PlannedRequest], bodies: dict[int, bytes]) -> None:
        while not self._all_sent.is_set() and (request := next(waiting, None)) is not None:
            await self._one(request, bodies.pop(request.index, None))
        self._all_sent.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    async def _one(self, request: PlannedRequest, body: bytes | None) -> None:
        exchange = Exchange()
        self._out[request.index] = (request, exchange)
        self._progress.began(request.index, exchange)
        try:
            async with asyncio.timeout(self._limits.request_s):
                await self._target.send(request, self._target.encode(request) if body is None else body, self._clock, exchange)
        except TimeoutError:
            self._give_up(exchange, Outcome.TIMEOUT, f"it had not ended after {self._limits.request_s:g} s")
        except asyncio.CancelledError:
            self._give_up(exchange)
            raise
        except Exception as error:
            _LOG.exception("request %d: the target raised", request.index)
            self._give_up(exchange, Outcome.FAILED, f"{type(error).__name__}: {error}")
        finally:
            self._note(request, exchange)

    def _give_up(self, exchange: Exchange, outcome: Outcome | None = None, error: str = "") -> None:
        if exchange.ended_s is None:
            exchange.ended_s = self._clock()
            exchange.outcome, exchange.error = (outcome, error) if outcome is not None else self._end

    def _note(self, request: PlannedRequest, exchange: Exchange) -> None:
        if self._out.pop(request.index, None) is not None:
            record = record_of(request, exchange, self._clock())
            self._records.append(record)
            self._progress.ended(record)

    async def _sample(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SAMPLE_TIMEOUT_S):
                    if (sample := await self._target.sample(self._clock)) is not None:
                        self._samples.append(sample)
            await asyncio.sleep(self._limits.sample_every_s)

    # What it gave

    def _measured(self, started_at: str, cold: dict[str, float], cpu: float) -> Measured:
        counted = [record for record in self._records if not record.warm_up]
        limit_s = lag_limit_s(self._limits.ttft_limit_s)
        generator = generator_of(counted, cpu, limit_s)
        begun_s = min((record.scheduled_s for record in counted), default=0.0)
        ended_s = max((record.ended_s for record in counted), default=begun_s)
        return Measured(
            started_at,
            ended_s - begun_s,
            tuple(sorted(self._records, key=lambda record: record.index)),
            generator,
            tuple(self._samples),
            cold,
            (*self._cut_short(counted), *void_reasons(generator, limit_s)),
        )

    def _cut_short(self, counted: list[Record]) -> Iterator[str]:
        num_unsent = len(self._plan.requests) - len(self._records)
        if self._cut.is_set():
            yield f"the run was cut: {num_unsent} of {len(self._plan.requests)} requests were not sent"
        elif num_unsent and self._plan.loop is Loop.OPEN:
            yield f"the run's limit of {self._limits.run_s:g} s left {num_unsent} of {len(self._plan.requests)} requests unsent"
        if not counted:
            yield "no request was measured"


def record_of(request: PlannedRequest, exchange: Exchange, now_s: float) -> Record:
    """The row of an exchange that is over; what ended well is looked at here."""
    ended_s = now_s if exchange.ended_s is None else exchange.ended_s
    outcome, error = exchange.outcome, exchange.error
    if outcome is Outcome.OK and (wrong := what_is_wrong(request, exchange)):
        outcome, error = Outcome.WRONG, wrong
    return Record(
        index=request.index,
        warm_up=request.warm_up,
        due_s=request.due_s,
        sent_s=ended_s if exchange.sent_s is None else exchange.sent_s,
        ended_s=ended_s,
        arrived=tuple(exchange.arrived),
        outcome=outcome,
        error=one_line(error),
        num_prompt_tokens=len(request.prompt_token_ids) if exchange.num_prompt_tokens is None else exchange.num_prompt_tokens,
        max_tokens=request.max_tokens,
        num_output_tokens=exchange.num_arrived_tokens if exchange.num_output_tokens is None else exchange.num_output_tokens,
        num_cached_tokens=exchange.num_cached_tokens,
        finish_reason=one_line(exchange.finish_reason),
        counted_by=exchange.counted_by,
        path=one_line(exchange.path),
    )


async def _end_all(tasks: list[asyncio.Task[Any]] | list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_LEAVE_S)
