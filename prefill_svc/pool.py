"""What every RPC of a prefill worker works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.async_engine import AsyncEngine
from kvtransfer.hold import Holds
from kvtransfer.inline import InlineSource
from kvtransfer.memory import MemorySource
from kvtransfer.quarantine import Quarantine
from kvtransfer.transport import KvSource
from telemetry.metrics import WorkerMetrics


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """An engine, its open holds, and the transports by which they can be read."""

    engine: AsyncEngine
    holds: Holds
    inline: InlineSource
    memory: MemorySource
    metrics: WorkerMetrics

    @property
    def sources(self) -> Mapping[str, KvSource]:
        """Transports by name."""
        return {"memory": self.memory, "inline": self.inline}

    def close(self) -> None:
        """No new reader of this process finds the pool."""
        self.memory.close()


def open_pool(engine: AsyncEngine, metrics: WorkerMetrics, *, max_reader_stop_s: float = 5.0) -> PrefillPool:
    """The pool of an engine; its owner must close it."""
    quarantine = Quarantine(max_stop_s=max_reader_stop_s, on_alarm=lambda _: metrics.num_quarantined_readers.inc(), on_end=metrics.num_quarantined_readers.dec)
    holds = Holds(engine, quarantine)
    blocks = engine.kv_cache.blocks
    return PrefillPool(engine, holds, InlineSource(blocks, holds), MemorySource(blocks, holds), metrics)
