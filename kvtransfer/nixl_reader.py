"""Transport `nixl`, decode's side: reads prefill's pool, or has prefill write into a staging region, whichever is possible and faster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import grpc

from engine.proto import kv_layout_from_proto
from kvtransfer.errors import HandoverError, NoTransportError, SourceGoneError
from kvtransfer.memories import BlockMemory, host_array
from kvtransfer.nixl_agent import NixlAgent
from kvtransfer.nixl_pull import NewAgent, NixlPull
from kvtransfer.nixl_push import NixlPush
from kvtransfer.nixl_settings import NixlSettings, load_nixl
from kvtransfer.nixl_staging import SLOT_BYTES, NixlStaging
from kvtransfer.transport import Probe, Rows
from tandem.v1 import kv_pb2, prefill_pb2

_log = logging.getLogger(__name__)
_START_S = 5.0
_ATTACH_S = 8.0
"""Time for connecting and a first probe, in each direction."""
_NUM_PROBES = 2


class NixlReader:
    """Of one pairing. `prepare` before `greet`, which else waits on the event loop for an agent (30 ms, the first one of a process half a second)."""

    name = "nixl"
    max_segment_bytes = 64 << 20

    def __init__(self, pool: BlockMemory, executor: Executor, control: grpc.aio.Channel, settings: NixlSettings, *, new_agent: NewAgent = NixlAgent) -> None:
        """Raises NoTransportError when NIXL cannot be used here."""
        self._nixl: Any = load_nixl(settings)
        self._pool = host_array(pool)
        self._executor = executor
        self._control = control
        self._settings = settings
        self._new_agent = new_agent
        self._staging = None if settings.direction == "read" else NixlStaging(self._nixl, slot_bytes=max(SLOT_BYTES, self._pool.shape[1]))
        self._lane: NixlPull | NixlPush | None = None
        self._closed = False
        self._num_reads = 0

    @property
    def lost(self) -> str:
        """Why nothing can be read any more until the pairing is made anew; empty as long as it can."""
        lane = self._lane
        return (lane.staging.lost if isinstance(lane, NixlPush) else lane.agent.lost) if lane else ""

    @property
    def direction(self) -> str:
        """The one that was taken: read or write; empty before."""
        return "" if self._lane is None else "write" if isinstance(self._lane, NixlPush) else "read"

    async def prepare(self) -> None:
        """Waits for what `greet` needs. Raises NoTransportError."""
        if self._staging is not None:
            await self._staging.agent.metadata()

    def greet(self, start: prefill_pb2.PairStart) -> None:
        """See KvReader: tells of the staging region."""
        if self._staging is None:
            return
        try:
            start.nixl_staging.CopyFrom(self._staging.describe(_START_S))
        except NoTransportError as error:
            _log.warning("there is no staging region: %s", error)

    async def attach(self, offer: prefill_pb2.PairResponse, source: kv_pb2.KvSource) -> None:
        """See KvReader: tries what is offered, and keeps the faster direction."""
        tried: list[tuple[float, NixlPull | NixlPush]] = []
        reasons: list[str] = []
        try:
            for lane in self._lanes(offer, source.nixl, reasons):
                try:
                    tried.append((await self._try(lane), lane))
                except HandoverError as error:
                    lane.close()
                    reasons.append(f"{_name(lane)}: {error}")
            if self._closed:
                raise SourceGoneError("the reader is closed")
            if not tried:
                raise NoTransportError("; ".join(reasons) or "prefill offers neither direction")
        except BaseException:
            for _, lane in tried:
                lane.close()
            raise
        tried.sort(key=lambda one: -one[0])
        self._lane = tried[0][1]
        for _, lane in tried[1:]:
            lane.close("the other direction was taken")
        speeds = ", ".join(f"{_name(lane)} {speed / 1e9:.3f} GB/s" for speed, lane in tried)
        _log.info("nixl takes %s by %s (%s)%s", self.direction, self._settings.lane, speeds, f"; not {'; '.join(reasons)}" if reasons else "")

    async def probe(self) -> Probe:
        """See KvReader."""
        with self._reading() as lane:
            return await lane.probe()

    async def read(self, ready: kv_pb2.KvReady, to: Rows) -> None:
        """See KvReader."""
        with self._reading() as lane:
            await lane.read(ready, host_array(to.memory), to.ids)

    def close(self) -> None:
        """See KvReader."""
        self._closed = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if not self._closed or self._num_reads:
            return
        if self._staging is not None:
            self._staging.close()
        if self._lane is not None:
            self._lane.close()

    @contextmanager
    def _reading(self) -> Iterator[NixlPull | NixlPush]:
        if self._closed or self._lane is None:
            raise SourceGoneError("the reader is closed" if self._closed else "the reader is not attached")
        self._num_reads += 1
        try:
            yield self._lane
        finally:
            self._num_reads -= 1
            self._end_if_unused()

    def _lanes(self, offer: prefill_pb2.PairResponse, source: kv_pb2.NixlSource, reasons: list[str]) -> Iterator[NixlPull | NixlPush]:
        if self._settings.direction == "write":
            reasons.append("read: not wanted")
        elif not source.agent_metadata:
            reasons.append("read: prefill offers no reads")
        else:
            yield NixlPull(self._nixl, self._pool, offer, source, self._new_agent)
        if self._staging is None:
            reasons.append("write: not wanted")
        elif not source.writes:
            reasons.append("write: prefill does not write")
        elif self._staging.slot_bytes < max(offer.probe_bytes, kv_layout_from_proto(offer.layout).block_bytes):
            reasons.append(f"write: a slot of {self._staging.slot_bytes} bytes is too small")
        else:
            yield NixlPush(self._staging, self._control, self._executor, offer)

    async def _try(self, lane: NixlPull | NixlPush) -> float:
        """Bytes per second of the better of two probes. Raises HandoverError."""
        try:
            async with asyncio.timeout(_ATTACH_S):
                if isinstance(lane, NixlPull):
                    await lane.connect()
                probes = [await lane.probe() for _ in range(_NUM_PROBES)]
        except TimeoutError:
            raise NoTransportError(f"a probe took more than {_ATTACH_S:g} s") from None
        return max(len(probe.content) / max(probe.elapsed_s, 1e-9) for probe in probes)


def _name(lane: NixlPull | NixlPush) -> str:
    return "write" if isinstance(lane, NixlPush) else "read"
