"""What a change of a KV path is told to: metrics and load reports. The log is the pairing's own, and a trace has it with the first hand-over behind it."""

from __future__ import annotations

from collections.abc import Callable

from decode_svc.paired import PathEvent
from telemetry.metrics import WorkerMetrics
from worker.load import LoadWatch


def kv_path_events(metrics: WorkerMetrics, load: LoadWatch) -> Callable[[PathEvent], None]:
    """The callback of the pairings of one worker."""

    def tell(event: PathEvent) -> None:
        if event.old and event.old != event.new:
            metrics.remove_kv_path(event.instance, event.old)
        if event.new:
            metrics.set_kv_path(event.instance, event.new, event.bytes_per_s)
        if event.old != event.new and not event.first:
            metrics.kv_path_changes(event.instance).inc()
        load.changed()

    return tell
