"""What every RPC of a prefill worker works on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.async_engine import AsyncEngine
from kvtransfer.hold import Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.memories import BlockMemory
from kvtransfer.nixl_settings import NixlSettings
from kvtransfer.quarantine import Quarantine
from kvtransfer.sources import SourceParts, Sources, open_sources
from kvtransfer.transport import NAMES
from prefill_svc.pairings import Pairings, PoolFacts
from telemetry.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """An engine, its open holds, the transports by which they can be read, and who is paired."""

    engine: AsyncEngine
    memory: BlockMemory
    holds: Holds
    sources: Sources
    pairings: Pairings
    executor: Executor
    """Makes digests."""
    metrics: WorkerMetrics


@asynccontextmanager
async def open_pool(
    engine: AsyncEngine,
    metrics: WorkerMetrics,
    *,
    transports: Sequence[str] = NAMES,
    socket_dir: Path | None = None,
    nixl: NixlSettings = NixlSettings(),  # noqa: B008 # frozen
    max_reader_stop_s: float = 5.0,
) -> AsyncIterator[PrefillPool]:
    """The pool of an engine; afterwards no new reader finds it. Its RPCs have ended by then."""
    quarantine = Quarantine(max_stop_s=max_reader_stop_s, on_alarm=lambda _: metrics.num_quarantined_readers.inc(), on_end=metrics.num_quarantined_readers.dec)
    holds = Holds(engine, quarantine)
    host = HostPool(engine.kv_cache)
    executor = ThreadPoolExecutor(1, thread_name_prefix="kv-digest")
    try:
        async with open_sources(SourceParts(host, holds, socket_dir, nixl=nixl), transports) as sources:
            yield PrefillPool(engine, host.memory, holds, sources, Pairings(PoolFacts.of(host), sources), executor, metrics)
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
