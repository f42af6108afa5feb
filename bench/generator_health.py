"""Whether the load generator itself kept up. A slow one makes a fast server look slow, and a slow server look fast."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from bench.record import Record
from bench.run import Generator
from bench.target import Clock

MIN_LAG_LIMIT_S = 0.005
LAG_SHARE_OF_TTFT = 0.01
MAX_CPU = 0.7
"""Of one core: beyond it, what waits for the event loop is no longer short beside what is measured."""
_CPU_EVERY_S = 1.0
_CPU_WINDOW_S = 10.0


def lag_limit_s(ttft_limit_s: float | None) -> float:
    """How late the p99 of all sends may be; `ttft_limit_s` is the strictest limit on TTFT, where there is one."""
    return max(MIN_LAG_LIMIT_S, LAG_SHARE_OF_TTFT * (ttft_limit_s or 0.0))


def generator_of(records: Sequence[Record], cpu: float, limit_s: float) -> Generator:
    """From the records without the warm-up's."""
    lags = np.array([record.sent_s - record.scheduled_s for record in records])
    if not len(lags):
        return Generator(0.0, 0.0, cpu)
    p50, p99 = np.percentile(lags, [50, 99])
    return Generator(float(p50), float(p99), cpu, int((lags > limit_s).sum()))


def void_reasons(generator: Generator, limit_s: float) -> tuple[str, ...]:
    """Why its figures cannot be trusted, each with the limit; empty: they can."""
    found = []
    if generator.send_lag_p99_s > limit_s:
        found.append(f"the generator lagged: send lag p99 {generator.send_lag_p99_s * 1e3:.1f} ms is above {limit_s * 1e3:.1f} ms")
    if generator.cpu > MAX_CPU:
        found.append(f"the generator was busy: it used {generator.cpu:.0%} of a core, above {MAX_CPU:.0%}")
    return tuple(found)


class CpuMeter:
    """CPU time of all threads of this process, noted every second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._points: list[tuple[float, float]] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                self.note()
                await asyncio.sleep(_CPU_EVERY_S)
        finally:
            self.note()

    def note(self) -> None:
        self._points.append((self._clock(), time.process_time()))

    @property
    def busiest(self) -> float:
        """The highest share of one core over ten seconds; over everything, where that is shorter."""
        shares = [0.0]
        start = 0
        for end, (at_s, used_s) in enumerate(self._points):
            while start + 1 < end and at_s - self._points[start + 1][0] >= _CPU_WINDOW_S:
                start += 1
            spent_s = at_s - self._points[start][0]
            if spent_s >= _CPU_WINDOW_S or (end == len(self._points) - 1 and start == 0 and spent_s > 0):
                shares.append((used_s - self._points[start][1]) / spent_s)
        return max(shares)


@contextmanager
def quiet_heap() -> Iterator[None]:
    """No garbage collection: with a plan's prompts on the heap a full one stops the event loop for tens of milliseconds."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
