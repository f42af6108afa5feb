"""Asks the engine now and then: its answer is the instance's readiness, and what it answers feeds the metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine.async_engine import AsyncEngine
from engine.errors import EngineDeadError
from engine.report import EngineLoad, EngineReport
from telemetry.metrics import WorkerMetrics

_log = logging.getLogger(__name__)


class EngineProbe:
    """Every `interval_s` asks for a report. An engine that does not answer within `max_answer_s` is not ready until it does again."""

    def __init__(
        self, engine: AsyncEngine, metrics: WorkerMetrics, set_ready: Callable[[bool, str], None], max_answer_s: float, *, interval_s: float = 1.0
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._set_ready = set_ready
        self._max_answer_s = max_answer_s
        self._interval_s = interval_s
        self._ready = False
        self._num_preemptions = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Returns after the first answer; probes as long as the block runs."""
        self._engine.on_load(self._loaded)
        await self._ask()
        task = asyncio.create_task(self._run(), name="engine probe")
        try:
            yield
        finally:
            task.cancel()

    async def _run(self) -> None:
        while self._engine.death is None:
            await asyncio.sleep(self._interval_s)
            await self._ask()

    async def _ask(self) -> None:
        try:
            report = await asyncio.wait_for(self._engine.report(), self._max_answer_s)
        except EngineDeadError as error:
            self._tell(False, str(error))
        except TimeoutError:
            self._tell(False, f"the engine has not answered for {self._max_answer_s:g} s")
        else:
            self._tell(True, "")
            self._count(report)

    def _tell(self, ready: bool, reason: str) -> None:
        if ready != self._ready:
            self._ready = ready
            self._set_ready(ready, reason)

    def _loaded(self, load: EngineLoad) -> None:
        self._metrics.num_requests_running.set(load.num_running)
        self._metrics.num_requests_waiting.set(load.num_waiting)
        self._metrics.num_requests_in_handover.set(load.num_in_handover)

    def _count(self, report: EngineReport) -> None:
        metrics = self._metrics
        for state, count in (("free", report.num_free_blocks), ("cached", report.num_cached_blocks), ("held", report.num_held_blocks)):
            metrics.blocks(state).set(count)
        metrics.kv_cache_usage_perc.set(report.num_held_blocks / report.num_blocks)
        metrics.prompt_tokens_computed.advance_to(report.computed_prompt_tokens)
        metrics.engine_steps.advance_to(report.num_steps)
        metrics.engine_late_steps.advance_to(report.num_late_steps)
        metrics.num_preemptions.inc(report.num_preemptions - self._num_preemptions)
        self._num_preemptions = report.num_preemptions
