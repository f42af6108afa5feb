"""Load and memory reports of a worker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence

from engine.async_engine import AsyncEngine
from engine.proto import kv_layout_to_proto
from engine.report import EngineLoad, EngineReport
from tandem.v1 import kv_pb2, load_pb2

INCARNATION = secrets.token_hex(8)
"""Tells this start of the process from every other one."""
_MIN_INTERVAL_S = 0.1


class LoadWatch:
    """What the worker says of its load, now and whenever it changed. Lives on the event loop."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._ready = False
        self._draining = False
        self._kv_paths: Callable[[], Sequence[kv_pb2.KvPath]] = tuple
        self._watchers: set[asyncio.Event] = set()
        engine.on_load(self._loaded)

    def set_ready(self, ready: bool) -> None:
        """Whether the instance takes requests."""
        self._ready = ready
        self.changed()

    def set_kv_paths(self, kv_paths: Callable[[], Sequence[kv_pb2.KvPath]]) -> None:
        """How KV gets here, as it is when asked; `changed` must be called when it is not what it was."""
        self._kv_paths = kv_paths
        self.changed()

    def set_draining(self) -> None:
        """The instance takes no more requests."""
        self._draining = True
        self.changed()

    def _loaded(self, load: EngineLoad) -> None:
        self.changed()

    def changed(self) -> None:
        """Something that the report tells is another."""
        for watcher in self._watchers:
            watcher.set()

    def report(self) -> load_pb2.LoadReport:
        """The load now."""
        load, model = self._engine.load(), self._engine.model
        limits = self._engine.limits
        return load_pb2.LoadReport(
            incarnation=INCARNATION,
            ready=self._ready and not self._draining,
            draining=self._draining,
            num_requests_running=load.num_running,
            num_requests_waiting=load.num_waiting,
            num_requests_in_handover=load.num_in_handover,
            prefill_backlog_tokens=load.backlog_tokens,
            num_blocks=load.num_blocks,
            num_free_blocks=load.num_free_blocks,
            block_size=model.layout.block_size,
            max_model_len=model.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            reserve_output_tokens=limits.reserve_output_tokens,
            layout=kv_layout_to_proto(model.layout),
            model=self._model_name,
            vocab_size=model.vocab_size,
            eos_token_ids=sorted(model.eos_token_ids),
            kv_paths=self._kv_paths(),
        )

    async def reports(self) -> AsyncGenerator[load_pb2.LoadReport, None]:
        """The report now, then each that differs from the one before; never faster than every 0.1 s."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            last = None
            while True:
                changed.clear()
                report = self.report()
                if report != last:
                    yield report
                    last = report
                    await asyncio.sleep(_MIN_INTERVAL_S)
                await changed.wait()
        finally:
            self._watchers.discard(changed)


def memory_report(report: EngineReport, *, num_holds: int, num_active_rpcs: int) -> load_pb2.MemoryReport:
    """An engine's report and what the service adds to it."""
    return load_pb2.MemoryReport(
        num_blocks=report.num_blocks,
        num_free_blocks=report.num_free_blocks,
        num_cached_blocks=report.num_cached_blocks,
        num_held_blocks=report.num_held_blocks,
        owners=[load_pb2.BlockOwner(name=name, num_blocks=count) for name, count in sorted(report.owners.items())],
        sequences_by_state=dict(report.sequences_by_state),
        num_holds=num_holds,
        num_readers=report.num_readers,
        computed_prompt_tokens=report.computed_prompt_tokens,
        num_steps=report.num_steps,
        num_late_steps=report.num_late_steps,
        num_active_rpcs=num_active_rpcs,
        num_preemptions=report.num_preemptions,
        num_readmissions=report.num_readmissions,
    )
