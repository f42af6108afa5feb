"""One run of the load generator against the server with known delays, with what both sides noted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.arrivals import Arrivals
from bench.openai_target import OpenAITarget
from bench.plan import Plan, PlannedRequest
from bench.prompts import Vocabulary
from bench.run import Run, Sample
from bench.run_files import read_run, write_run
from bench.runner import RunLimits
from bench.schedule import Extent, Fit, plan_of
from bench.session import open_session
from bench.tandem_target import TandemTarget
from bench.target import Clock, Exchange, Target
from bench.workloads import workload_of
from checks.bench_delays import Kind
from checks.bench_machine import Busy, Machine
from checks.bench_server import Served

_ANSWER_S, _EXIT_S = 10.0, 10.0
_OUTPUT = Path("out/check-bench")
_BLOCK_S, _BLOCK_EVERY_S = 0.012, 0.1


class Slow(StrEnum):
    """What a generator may be made slow by."""

    NOTHING = "nothing"
    BLOCKED_LOOP = "its event loop stands still 12 ms in every 112 ms"
    BURNER = "a thread of its process burns a core"


class Clocked:
    """A target that passes everything on, and keeps when the run's clock stood at 0."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.name = target.name
        self.start_s = 0.0
        """time.monotonic(); 0: nothing of the plan was sent."""

    async def open(self) -> None:
        await self._target.open()

    def encode(self, request: PlannedRequest) -> bytes:
        return self._target.encode(request)

    async def send(self, request: PlannedRequest, body: bytes, clock: Clock, exchange: Exchange) -> None:
        if not self.start_s and request.index >= 0:
            self.start_s = time.monotonic() - clock()
        await self._target.send(request, body, clock, exchange)

    async def sample(self, clock: Clock) -> Sample | None:
        return await self._target.sample(clock)

    async def describe(self) -> dict[str, str]:
        return await self._target.describe()

    async def close(self) -> None:
        await self._target.close()


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and how."""

    protocol: str
    """grpc or http."""
    arrivals: Arrivals
    num_requests: int
    num_warm_up: int = 5
    seed: int = 1
    slow_first_s: float = 0.0
    """By so much the cold start's request and those of the warm-up are slower: none of it may be in a figure."""
    stall_after_s: float = 0.0
    """0: the server does not stall."""
    stall_s: float = 0.0
    faults: bool = False
    slow: Slow = Slow.NOTHING

    def plan(self) -> Plan:
        """Prompts of 8 to 32 tokens, answers of 12 to 24."""
        workload = workload_of("uniform", input_len="8:32", output_len="12:24")
        return plan_of(workload, self.arrivals, Extent(self.num_requests, None, self.num_warm_up), Fit(Vocabulary(32_000)), self.seed)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of it."""

    load: Load
    plan: Plan
    run: Run
    served: dict[int, Served]
    """By the request's key; without the cold start's."""
    start_s: float
    """When the run's clock stood at 0, in time.monotonic()."""
    stall: tuple[float, float]
    """From and to, in time.monotonic(); both 0 without one."""
    busy: Busy


class KnownServer:
    """The server's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.addresses: dict[str, str] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    async def tell(self, **command: Any) -> Any:
        """A command, and its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> Any:
        """Its next line."""
        assert self._process.stdout is not None
        return json.loads(await asyncio.wait_for(self._process.stdout.readline(), _ANSWER_S))

    async def load(self, load: Load) -> Loaded:
        """One run. Everything that the server noted before is forgotten."""
        await self.tell(take=True)
        await self.tell(faults=load.faults)
        await self.tell(slow_first=load.num_warm_up + 1, by_s=load.slow_first_s)
        plan = load.plan()
        target = Clocked(TandemTarget(self.addresses["grpc"]) if load.protocol == "grpc" else OpenAITarget(self.addresses["http"]))
        limits = RunLimits(request_s=30.0, run_s=120.0, drain_s=30.0, cold_start_s=30.0)
        async with open_session(target, limits, lambda described: dict(described)) as session:
            stall = [0.0, 0.0]
            machine = Machine([os.getpid(), self.pid])
            stalling = asyncio.create_task(self._stall(load, target, stall))
            async with _slowed(load.slow):
                run = await session.load(plan, f"{load.protocol} {plan.loop.value} {load.slow.name.lower()}")
            await stalling
            busy = machine.busy()
        run = read_run(write_run(run, _OUTPUT))
        served = [Served(**{**each, "kind": Kind(each["kind"])}) for each in await self.tell(take=True)]
        by_key = {each.key: each for each in served[1:]}  # the first is the cold start's
        return Loaded(load, plan, run, by_key, target.start_s, (stall[0], stall[1]), busy)

    async def _stall(self, load: Load, target: Clocked, stall: list[float]) -> None:
        if load.stall_s <= 0:
            return
        while not target.start_s:  # noqa: ASYNC110 - the run's clock has no event
            await asyncio.sleep(0.01)
        begin_s = target.start_s + load.stall_after_s
        stall[:] = [begin_s, begin_s + load.stall_s]
        await self.tell(stall_at_s=begin_s, for_s=load.stall_s)


@asynccontextmanager
async def known_server() -> AsyncIterator[KnownServer]:
    """Starts it, and ends it at the end. On no core of its own: on a machine that is shared, the scheduler finds the free one."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "checks.bench_server", stdin=pipe, stdout=pipe, limit=1 << 26)
    server = KnownServer(process)
    try:
        server.addresses = await server.answer()
        yield server
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _EXIT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def _slowed(by: Slow) -> AsyncIterator[None]:
    """Makes this process a slow generator."""
    ended = threading.Event()

    async def block() -> None:
        while True:
            time.sleep(_BLOCK_S)  # noqa: ASYNC251 - it is what a slow generator does
            await asyncio.sleep(_BLOCK_EVERY_S)

    def burn() -> None:
        while not ended.is_set():
            sum(range(1000))

    burner = threading.Thread(target=burn)
    blocking = asyncio.create_task(block()) if by is Slow.BLOCKED_LOOP else None
    if by is Slow.BURNER:
        burner.start()
    try:
        yield
    finally:
        ended.set()
        if by is Slow.BURNER:
            burner.join()
        if blocking is not None:
            blocking.cancel()
