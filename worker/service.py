"""A worker's life as a process: load the model, serve, watch the engine, drain."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from engine.async_engine import AsyncEngine
from engine.config import ConfigError, EngineConfig
from engine.errors import EngineDeadError, EngineError
from engine.watchdog import Watchdog
from rpc.errors import StartupError
from rpc.server import RpcServer, check_address
from rpc.service import Service
from rpc.settings import flag_of
from telemetry.metrics import RpcMetrics, WorkerMetrics
from worker.load import LoadWatch
from worker.probe import EngineProbe
from worker.settings import WorkerSettings

_log = logging.getLogger(__name__)
_DEAD_ENGINE_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Worker:
    """What a service registers its RPCs on."""

    engine: AsyncEngine
    metrics: WorkerMetrics
    load: LoadWatch
    server: RpcServer


Register = Callable[[Worker], AbstractAsyncContextManager[None]]
BuildEngine = Callable[[EngineConfig], AsyncEngine]


async def serve_worker(service: Service, settings: WorkerSettings, register: Register, build: BuildEngine | None = None) -> None:
    """Serves until the service is told to stop or the engine dies. `register` adds the RPCs and closes what it opened. Raises StartupError."""
    check_address(settings.host, settings.port)
    engine = await _load_engine(settings, build or _build_engine)
    name = settings.served_model_name or engine.model.name
    metrics = WorkerMetrics(name, service.name)
    metrics.set_cache_config(block_size=engine.model.layout.block_size, num_blocks=engine.kv_cache.num_blocks)
    server = RpcServer(service.name, host=settings.host, port=settings.port, reflection=settings.reflection, metrics=RpcMetrics())
    worker = Worker(engine, metrics, LoadWatch(engine, name), server)
    async with _running(worker, service, settings), register(worker):
        await server.start()
        async with EngineProbe(worker.engine, metrics, _readiness(worker), settings.max_stall_s).running():
            service.started()
            await service.wait_for_stop()
            worker.load.set_draining()
            await server.drain(_DEAD_ENGINE_GRACE_S if service.failure else settings.drain_grace_s)


def _readiness(worker: Worker) -> Callable[[bool, str], None]:
    def set_ready(ready: bool, reason: str) -> None:
        worker.load.set_ready(ready)
        worker.server.set_ready(ready, reason)

    return set_ready


async def _load_engine(settings: WorkerSettings, build: BuildEngine) -> AsyncEngine:
    config = settings.engine_config()
    try:
        return await asyncio.to_thread(build, config)
    except ConfigError as error:
        raise StartupError(f"{flag_of(error.field)}: {str(error).removeprefix(f'{error.field}: ')}") from error
    except (EngineError, OSError, MemoryError) as error:
        raise StartupError(f"--model: {str(error) or type(error).__name__}") from error


def _build_engine(config: EngineConfig) -> AsyncEngine:
    # Before torch loads OpenMP: threads that spin at a barrier take the cores from the threads they wait for as soon as another process is busy
    # (24 tokens took 23 s instead of 2.5 with two threads on two busy cores).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The step's many small calls compete with the event loop for the GIL, which is handed over at this pace.
    sys.setswitchinterval(0.0005)
    # Here and not above: torch takes seconds to import, and --help needs none of it.
    from engine.build import build_engine

    return build_engine(config)


@asynccontextmanager
async def _running(worker: Worker, service: Service, settings: WorkerSettings) -> AsyncIterator[None]:
    """The engine thread and its watchdog; the thread's death is the service's."""
    engine = worker.engine

    def died(cause: BaseException) -> None:
        _readiness(worker)(False, "the engine is dead")
        service.fail(cause)

    engine.on_death(died)
    await engine.start()
    async with _loop_beat(settings.max_stall_s) as beat:
        watchdog = Watchdog(settings.max_stall_s, {"engine": engine.beat, "loop": beat})
        watchdog.start()
        try:
            yield
        finally:
            try:
                # The watchdog's bound is the shorter one, and the only one that ends a process whose step hangs: the interpreter waits for the device's thread.
                await engine.stop(timeout_s=2 * settings.max_stall_s)
            except (TimeoutError, EngineDeadError) as error:
                service.fail(error)
            await asyncio.to_thread(watchdog.stop)


@asynccontextmanager
async def _loop_beat(max_stall_s: float) -> AsyncIterator[Callable[[], int]]:
    """A number that grows as long as the event loop turns."""
    beat = 0

    async def run() -> None:
        nonlocal beat
        while True:
            beat += 1
            await asyncio.sleep(max_stall_s / 20)

    task = asyncio.create_task(run(), name="loop beat")
    try:
        yield lambda: beat
    finally:
        task.cancel()
