"""A target that is loaded once or several times, with what there is to note of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from rich.console import Console

from bench.live import LiveView
from bench.plan import Plan
from bench.plan_statistics import statistics_of
from bench.progress import Progress
from bench.run import Run
from bench.runner import RunLimits, Runner
from bench.target import Target

Environment = Callable[[Mapping[str, str]], dict[str, Any]]
"""Of what the target says of itself."""


class Session:
    """One target that is open. The first run measures the cold start."""

    def __init__(
        self, target: Target, limits: RunLimits, described: Mapping[str, str], environment: dict[str, Any], console: Console | None, *, cold_start: bool
    ) -> None:
        self.described = described
        """What the target says of itself."""
        self._target = target
        self._limits = limits
        self._environment = environment
        self._console = console
        self._cold_start = cold_start
        self.cut = False
        """The user ended the last run early."""

    async def load(self, plan: Plan, label: str) -> Run:
        """One run. Ctrl-C ends it and keeps what it has; a second one ends the process. Raises TargetError."""
        progress = Progress()
        runner = Runner(plan, self._target, self._limits, progress, cold_start=self._cold_start)
        view = None if self._console is None else asyncio.create_task(LiveView(progress, self._console, label).run())
        try:
            with _cut_by_signal(self._cut(runner)):
                measured = await runner.run()
        finally:
            if view is not None:
                view.cancel()
                with suppress(asyncio.CancelledError):
                    await view
        self._cold_start = False
        return Run(
            label=label,
            target=self._target.name,
            plan=plan_facts(plan),
            started_at=measured.started_at,
            duration_s=measured.duration_s,
            records=measured.records,
            generator=measured.generator,
            environment=self._environment,
            samples=measured.samples,
            cold_start=measured.cold_start,
            void=measured.void,
        )

    def _cut(self, runner: Runner) -> Callable[[], None]:
        def cut() -> None:
            self.cut = True
            runner.cut()

        return cut


@asynccontextmanager
async def open_session(
    target: Target, limits: RunLimits, environment: Environment, console: Console | None = None, *, cold_start: bool = True
) -> AsyncIterator[Session]:
    """Opens the target and closes it. Progress goes to `console`. Raises TargetError."""
    try:
        await target.open()
        described = await target.describe()
        yield Session(target, limits, described, environment(described), console, cold_start=cold_start)
    finally:
        await target.close()


def plan_facts(plan: Plan) -> dict[str, Any]:
    """The plan without its requests: what a report says of the load."""
    counted = [request for request in plan.requests if not request.warm_up]
    facts: dict[str, Any] = {
        "workload": plan.workload,
        "loop": plan.loop.value,
        "arrivals": plan.arrivals,
        "scale": plan.scale,
        "seed": plan.seed,
        "num_requests": len(counted),
        "num_warm_up": len(plan.requests) - len(counted),
        "num_prompt_tokens": sum(len(request.prompt_token_ids) for request in counted),
        "num_output_tokens": sum(request.max_tokens for request in counted),
    }
    if counted:
        facts |= statistics_of(plan).to_json()
    return facts if plan.concurrency is None else facts | {"concurrency": plan.concurrency}


@contextmanager
def _cut_by_signal(cut: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM cut, once: the next one does what it always does."""
    loop = asyncio.get_running_loop()
    taken: list[signal.Signals] = []

    def take() -> None:
        give_back()
        cut()

    def give_back() -> None:
        while taken:
            loop.remove_signal_handler(taken.pop())

    try:
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, take)
            taken.append(signum)
    except (ValueError, NotImplementedError, RuntimeError):
        give_back()  # in a thread that is not the main one: whoever started it ends it
    try:
        yield
    finally:
        give_back()
