"""One prompt that one prefill instance computes and whose KV is copied into blocks of this engine (design rule 2)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from decode_svc.computed_prompt import ComputedPrompt, ask, take
from decode_svc.failures import AttemptFailedError, attempt_at, is_own_end
from decode_svc.generate_rpc import GenerateRpc
from decode_svc.job import Job
from decode_svc.paired import Paired
from decode_svc.pairing_attempt import NotPairedError
from decode_svc.peers import PrefillPeer
from decode_svc.prefill_call import PrefillCall, prefill_call
from kvtransfer.errors import HandoverProtocolError
from kvtransfer.handover import Handover
from kvtransfer.path import Destination
from rpc.errors import deadline_exceeded
from tandem.v1 import decode_pb2
from telemetry import spans
from telemetry.tracing import AttributeValue, SpanEvent, record_span

_MIN_WAIT_NS = 1_000_000
"""A pairing that is there is not worth a span."""


@asynccontextmanager
async def paired_with(peer: PrefillPeer, rpc: GenerateRpc) -> AsyncIterator[Paired]:
    """The pairing with an instance, open for what happens in the block. Raises AttemptFailedError when there is none in time, StatusError."""
    started_ns = time.monotonic_ns()
    try:
        paired = await peer.pairing.paired(rpc.timeout_s())
    except NotPairedError as error:
        _record_wait(started_ns, rpc, peer, error="NOT_PAIRED")
        if is_own_end(rpc.remaining_s):
            raise deadline_exceeded("pairing") from error
        reason = "NOT_PAIRED" if error.pairs else grpc.StatusCode.FAILED_PRECONDITION.name
        raise AttemptFailedError(peer.name, reason, str(error), pairs=error.pairs) from error
    _record_wait(started_ns, rpc, peer)
    with paired.in_use():
        yield paired


def _record_wait(started_ns: int, rpc: GenerateRpc, peer: PrefillPeer, error: str | None = None) -> None:
    ended_ns = time.monotonic_ns()
    if error is not None or ended_ns - started_ns > _MIN_WAIT_NS:
        record_span(spans.PAIRING, started_ns, ended_ns, parent=rpc.trace, attributes={spans.PREFILL_INSTANCE: peer.name}, error=error)


class RemotePrompt:
    """The Prefill RPC and the reading of what it announces, both only within `opened`."""

    def __init__(self, rpc: GenerateRpc, peer: PrefillPeer, paired: Paired, job: Job) -> None:
        self._rpc = rpc
        self._peer = peer
        self._paired = paired
        self._job = job
        self._handover: Handover | None = None
        self._exposed_s = 0.0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[PrefillCall]:
        """The call, on which nothing has been asked.

        What leaves is AttemptFailedError when another one may do better, StatusError, or a cancel; the copy counts for nothing then.
        """
        try:
            resumes = bool(self._job.output_token_ids)
            with (
                attempt_at(self._peer.name, self._rpc.context, resumes=resumes),
                prefill_call(self._peer, self._paired, self._rpc.timeout_s()) as call,
            ):
                yield call
        except BaseException as error:
            self._record_span(error=error.reason if isinstance(error, AttemptFailedError) else "cancelled")
            raise
        finally:
            if self._handover is not None:
                self._handover.stop()

    async def computed(self, call: PrefillCall, to: Destination, meanwhile: Callable[[], Awaitable[None]] | None = None) -> ComputedPrompt:
        """Asks for the prompt and waits until it is computed; its blocks are read as they come. What is done `meanwhile` delays nothing of prefill's."""
        pool = self._rpc.pool
        handover = self._handover = Handover(to, self._paired.path, pool.engine, pool.quarantine)
        asked_ns = await ask(call, self._job, self._paired, hold=True, num_cached_tokens=to.num_cached_tokens)
        if meanwhile is not None:
            await meanwhile()
        return await take(call, pool, self._job, asked_ns, handover)

    async def confirmed(self, call: PrefillCall, computed: ComputedPrompt) -> None:
        """Waits until all blocks are here and prefill has confirmed them."""
        done, handover = computed.done, self._begun()
        num_blocks = await call.copied(handover)
        if done.num_blocks != num_blocks or not done.hold_id or (handover.hold_id and done.hold_id != handover.hold_id):
            raise HandoverProtocolError(f"prefill says it announced {done.num_blocks} blocks of the hold, {num_blocks} were read")
        await call.confirm(done.hold_id, num_blocks)
        self._exposed_s = (time.monotonic_ns() - computed.at_ns) / 1e9

    async def stopped(self) -> None:
        """Waits, behind `opened`, until nothing of this can touch the blocks any more."""
        if self._handover is not None:
            await self._handover.stopped()

    def record(self) -> decode_pb2.HandoverReport:
        """Span, metrics and report of a prompt that was confirmed."""
        record, metrics = self._begun().record, self._rpc.pool.metrics
        wire_s, hidden_s = record.wire_ns / 1e9, record.hidden_ns / 1e9
        if record.num_blocks:
            self._paired.handed_over()
            metrics.kv_transfer_bytes(record.transport).inc(record.num_bytes)
            metrics.kv_transfer_time_seconds(record.transport).observe(wire_s)
            metrics.kv_transfer_hidden_time_seconds(record.transport).observe(hidden_s)
            self._record_span()
        return decode_pb2.HandoverReport(
            transport=record.transport if record.num_blocks else "",
            kv_bytes=record.num_bytes,
            num_blocks=record.num_blocks,
            transfer_s=wire_s,
            exposed_s=self._exposed_s,
            hidden_s=hidden_s,
        )

    def _begun(self) -> Handover:
        assert self._handover is not None, "nothing was asked for"
        return self._handover

    def _record_span(self, error: str | None = None) -> None:
        if self._handover is None or not self._handover.record.started_ns:
            return
        record = self._handover.record
        ended_ns = record.ended_ns if error is None else time.monotonic_ns()
        attributes: dict[str, AttributeValue] = {
            spans.KV_BYTES: record.num_bytes,
            spans.NUM_BLOCKS: record.num_blocks,
            spans.KV_TRANSPORT: record.transport,
            spans.KV_PATH_BYTES_PER_S: self._paired.path.bytes_per_s,
            spans.KV_WIRE_S: record.wire_ns / 1e9,
            spans.KV_HIDDEN_S: record.hidden_ns / 1e9,
            spans.KV_OVERLAP: record.hidden_ns / record.wire_ns if record.wire_ns else 0.0,
            spans.KV_WAIT_S: (ended_ns - record.started_ns - record.wire_ns) / 1e9,
            spans.KV_EXPOSED_S: self._exposed_s,
        }
        events = self._news(record.started_ns)
        record_span(spans.KV_TRANSFER, record.started_ns, ended_ns, parent=self._rpc.trace, attributes=attributes, events=events, error=error)

    def _news(self, at_ns: int) -> list[SpanEvent]:
        """The first hand-over by a path that is another one than before says so in its trace."""
        news, self._paired.news = self._paired.news, None
        if news is None:
            return []
        attributes = {spans.KV_PATH_FROM: news.old, spans.KV_PATH_TO: news.new, spans.KV_PATH_REASON: news.reason}
        return [(spans.KV_PATH_CHANGED, at_ns, attributes)]
