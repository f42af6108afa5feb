"""`python -m tests.support.stalling_worker KIND MAX_STALL_S`: a decode worker over a fake engine that stalls in one of several ways, or does not.

Prints "stalls" just before it does. A worker that does not stall lives for two stall times, drains, and prints "alive".
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import re
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from decode_svc.settings import DecodeSettings
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from engine.step import StepPlan, StepResult
from rpc.service import Service, run_service
from tests.support.engines import collect, fake_engine
from tests.support.fake_device import FakeDevice
from worker.service import Worker, serve_worker

_LONG_S = 60
_STEPS_A_STALL = 5


def hang_in_kernel() -> None:
    """What runs on the device never ends."""
    time.sleep(_LONG_S)


def hang_the_loop() -> None:
    """A callback blocks; the GIL is free."""
    time.sleep(_LONG_S)


def hold_the_gil() -> None:
    """A call into C keeps the GIL."""
    ctypes.PyDLL(None).sleep(_LONG_S)


def match_without_end() -> None:
    """Python's own matcher keeps the GIL too."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def _hang_first_step(device: FakeDevice) -> None:
    # A pool's thread, as a device's is: the interpreter waits for it at its end.
    thread = ThreadPoolExecutor(1)

    def launch(plan: StepPlan) -> Future[StepResult]:
        thread.submit(hang_in_kernel)
        return Future()

    device.launch = launch  # type: ignore[method-assign]


def _slow_down(device: FakeDevice, step_s: float) -> None:
    launch = device.launch

    def slowly(plan: StepPlan) -> Future[StepResult]:
        time.sleep(step_s)
        return launch(plan)

    device.launch = slowly  # type: ignore[method-assign]


def _build(kind: str, max_stall_s: float) -> AsyncEngine:
    if kind == "slow warm-up":
        time.sleep(2 * max_stall_s)
    engine, device = fake_engine()
    if kind.startswith("hung kernel"):
        _hang_first_step(device)
        engine.stop = functools.partial(engine.stop, timeout_s=0.1)  # type: ignore[method-assign]  # unless the worker says how long
    if kind == "long load":
        _slow_down(device, max_stall_s / _STEPS_A_STALL)
    return engine


def _spec(max_tokens: int) -> SequenceSpec:
    return SequenceSpec("s", (1, 2, 3), SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), SequenceKind.LOCAL)


async def _use(engine: AsyncEngine, kind: str, max_stall_s: float) -> None:
    if kind in ("hung kernel", "hung kernel at the end", "hung loop", "held GIL", "endless match"):
        print("stalls", flush=True)
    match kind:
        case "hung kernel":
            engine.submit(_spec(1))
            while True:  # calls are answered all the time, and that is no sign of life
                await engine.report()
                await asyncio.sleep(max_stall_s / 20)
        case "hung kernel at the end":
            engine.submit(_spec(1))
            await engine.report()
        case "hung loop":
            hang_the_loop()
        case "held GIL":
            await asyncio.to_thread(hold_the_gil)
        case "endless match":
            await asyncio.to_thread(match_without_end)
        case "long load":
            await collect(engine, _spec(2 * _STEPS_A_STALL))
        case _:
            await asyncio.sleep(2 * max_stall_s)


def main(kind: str, max_stall_s: float) -> int:
    """Runs the worker; returns its exit code."""
    settings = DecodeSettings(model=Path("fake"), port=0, metrics_port=-1, max_stall_s=max_stall_s)

    def build(_: EngineConfig) -> AsyncEngine:
        return _build(kind, max_stall_s)

    async def serve(service: Service) -> None:
        @asynccontextmanager
        async def register(worker: Worker) -> AsyncIterator[None]:
            using = asyncio.create_task(_use(worker.engine, kind, max_stall_s))
            using.add_done_callback(lambda _: service.stop())
            yield
            await using

        await serve_worker(service, settings, register, build)

    code = run_service(serve, settings, "decode")
    if code == 0:
        print("alive", flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], float(sys.argv[2])))
