"""One attempt to have a prompt computed by one prefill instance."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc

from decode_svc.failures import AttemptFailedError, attempt_at, is_own_cancel
from decode_svc.job import Job
from decode_svc.output import Output
from decode_svc.peers import PrefillPeer
from decode_svc.pool import DecodePool
from decode_svc.prefill_call import PrefillCall, prefill_call
from decode_svc.tokens import DecodeSpan, send_first, stream_tokens
from engine.async_engine import ReservedSequence
from engine.proto import kv_layout_to_proto, token_from_proto
from engine.sampling_params import Finish, FinishReason, SampledToken
from engine.sequence import SequenceKind
from kvtransfer.errors import HandoverProtocolError
from kvtransfer.handover import Destination, Handover
from kvtransfer.memory import PROCESS_ID
from rpc.deadline import next_hop_s, remaining_s
from rpc.failpoints import failpoint
from tandem.v1 import decode_pb2, prefill_pb2
from telemetry import spans
from telemetry.tracing import AttributeValue, current_context, record_span, span

Context = grpc.aio.ServicerContext[Any, Any]


class HandoverAttempt:
    """Reserve, have it computed, copy, confirm, decode. `run` is its whole life."""

    def __init__(self, pool: DecodePool, peer: PrefillPeer, job: Job, output: Output, report: decode_pb2.PromptReport, context: Context) -> None:
        self._pool = pool
        self._peer = peer
        self._job = job
        self._output = output
        self._report = report
        self._context = context
        self._spec = job.spec(SequenceKind.REMOTE_KV)
        self._trace = current_context()

    async def run(self) -> None:
        """Raises AttemptFailedError when another attempt may do better, StatusError, CapacityError; gives everything back in any case."""
        engine = self._pool.engine
        handover: Handover | None = None
        try:
            reserved = await self._reserve()
            handover = Handover(self._destination(reserved), self._peer.readers, engine, self._pool.quarantine)
            try:
                with attempt_at(self._peer.name, self._context):
                    decode = await self._hand_over(reserved, handover)
            except BaseException as error:
                self._record_transfer(handover, error=error.reason if isinstance(error, AttemptFailedError) else "cancelled")
                raise
            if decode is not None:
                await stream_tokens(self._pool, self._output, reserved.stream, decode)
        finally:
            if handover is not None:
                handover.stop()
            engine.release(self._spec.seq_id)

    async def _reserve(self) -> ReservedSequence:
        with span(spans.RESERVE) as handle:
            await failpoint(spans.RESERVE)
            reserved = await self._pool.engine.reserve(self._spec)
            handle.set_attribute(spans.NUM_BLOCKS, len(reserved.block_ids))
            handle.set_attribute(spans.NUM_CHARGED_BLOCKS, reserved.num_charged_blocks)
        cached_tokens = reserved.num_cached_blocks * self._pool.engine.model.layout.block_size
        await self._output.reservation(num_charged_blocks=reserved.num_charged_blocks, num_blocks=len(reserved.block_ids), cached_tokens=cached_tokens)
        return reserved

    def _destination(self, reserved: ReservedSequence) -> Destination:
        block_bytes = self._pool.engine.model.layout.block_bytes
        return Destination(self._spec.seq_id, reserved.block_ids, reserved.num_cached_blocks, reserved.num_prompt_blocks, block_bytes)

    async def _hand_over(self, reserved: ReservedSequence, handover: Handover) -> DecodeSpan | None:
        """Returns when the copy is valid and the sequence decodes; None when the first token was the last."""
        with prefill_call(self._peer, _timeout_s(self._pool, self._context)) as call:
            start = _start(self._pool, self._job, reserved.num_cached_blocks)
            start.transports.extend(self._peer.readers)
            start.process_id = PROCESS_ID
            await call.start(start)
            done = await call.done(handover)
            done_ns = time.monotonic_ns()
            first = _first_token(self._pool, done)
            if first is None:
                raise HandoverProtocolError("prefill sent no first token")
            finish = self._job.finish_of_first(first, self._pool.engine.model)
            self._pool.pace.saw(queue_s=done.queue_s, prefill_s=done.prefill_s, num_tokens=done.computed_tokens)
            self._report.cached_tokens = done.cached_tokens
            decode = DecodeSpan(self._trace)
            try:
                if finish is not None:
                    self._output.handed_over(decode_pb2.HandoverReport())
                    await send_first(self._pool, self._output, [first], self._report, finish, decode)
                    decode.end(1)
                    return None
                await self._send_and_confirm(call, done, handover, first, decode)
                await self._pool.engine.commit(self._spec.seq_id, first)
            except BaseException as error:
                decode.end(1, type(error).__name__)
                raise
        self._record(handover, done_ns)
        return decode

    async def _send_and_confirm(self, call: PrefillCall, done: prefill_pb2.PrefillDone, handover: Handover, first: SampledToken, decode: DecodeSpan) -> None:
        """The first token goes out at once, and the hand-over is confirmed meanwhile: a slow client must not keep prefill's blocks."""
        sending = asyncio.ensure_future(send_first(self._pool, self._output, [first], self._report, None, decode))
        try:
            await self._confirm(call, done, handover)
        except BaseException:
            if is_own_cancel():
                sending.cancel()
            else:
                # The token is on its way and cannot be taken back: what follows must know that the client has it.
                await sending
            raise
        await sending

    async def _confirm(self, call: PrefillCall, done: prefill_pb2.PrefillDone, handover: Handover) -> None:
        num_blocks = await call.copied(handover)
        if done.num_blocks != num_blocks or not done.hold_id or (handover.hold_id and done.hold_id != handover.hold_id):
            raise HandoverProtocolError(f"prefill says it announced {done.num_blocks} blocks of the hold, {num_blocks} were read")
        await call.confirm(done.hold_id, num_blocks)

    def _record(self, handover: Handover, done_ns: int) -> None:
        """Span, metrics and report of a hand-over that is confirmed."""
        record = handover.record
        exposed_s, wire_s = (time.monotonic_ns() - done_ns) / 1e9, record.wire_ns / 1e9
        self._output.handed_over(
            decode_pb2.HandoverReport(
                transport=record.transport, kv_bytes=record.num_bytes, num_blocks=record.num_blocks, transfer_s=wire_s, exposed_s=exposed_s
            )
        )
        if record.num_blocks:
            self._pool.metrics.kv_transfer_bytes(record.transport).inc(record.num_bytes)
            self._pool.metrics.kv_transfer_time_seconds(record.transport).observe(wire_s)
            self._record_transfer(handover, exposed_s=exposed_s)

    def _record_transfer(self, handover: Handover, *, exposed_s: float = 0.0, error: str | None = None) -> None:
        record = handover.record
        if not record.started_ns:
            return
        ended_ns = record.ended_ns if error is None else time.monotonic_ns()
        attributes: dict[str, AttributeValue] = {
            spans.KV_BYTES: record.num_bytes,
            spans.NUM_BLOCKS: record.num_blocks,
            spans.KV_TRANSPORT: record.transport,
            spans.KV_WIRE_S: record.wire_ns / 1e9,
            spans.KV_WAIT_S: (ended_ns - record.started_ns - record.wire_ns) / 1e9,
            spans.KV_EXPOSED_S: exposed_s,
        }
        record_span(spans.KV_TRANSFER, record.started_ns, ended_ns, parent=self._trace, attributes=attributes, error=error)


async def compute_first_token(pool: DecodePool, peer: PrefillPeer, job: Job, output: Output, report: decode_pb2.PromptReport, context: Context) -> None:
    """At most one token is wanted: nothing is reserved here and nothing is copied. Raises AttemptFailedError, StatusError."""
    await output.reservation(num_charged_blocks=0, num_blocks=0, cached_tokens=0)
    with attempt_at(peer.name, context), prefill_call(peer, _timeout_s(pool, context)) as call:
        await call.start(_start(pool, job, 0))
        done = await call.done(None)
        first = _first_token(pool, done)
        finish = Finish(FinishReason.LENGTH) if first is None else job.finish_of_first(first, pool.engine.model)
        if (first is None) != (job.num_left < 1) or finish is None:
            raise HandoverProtocolError("prefill sent a first token where none was asked for, or none where one was")
        await call.end()
    pool.pace.saw(queue_s=done.queue_s, prefill_s=done.prefill_s, num_tokens=done.computed_tokens)
    report.cached_tokens = done.cached_tokens
    output.handed_over(decode_pb2.HandoverReport())
    decode = DecodeSpan(current_context())
    await send_first(pool, output, [] if first is None else [first], report, finish, decode)
    decode.end(len(output.token_ids))


def _timeout_s(pool: DecodePool, context: Context) -> float:
    return next_hop_s(remaining_s(context, pool.max_request_time_s), "reserve")


def _start(pool: DecodePool, job: Job, num_cached_blocks: int) -> prefill_pb2.PrefillStart:
    start = job.start()
    start.layout.CopyFrom(kv_layout_to_proto(pool.engine.model.layout))
    start.num_cached_blocks = num_cached_blocks
    return start


def _first_token(pool: DecodePool, done: prefill_pb2.PrefillDone) -> SampledToken | None:
    """Raises FieldError for a token that the model does not have."""
    if not done.HasField("token_id"):
        return None
    logprob = done.logprob if done.HasField("logprob") else None
    return token_from_proto(done.token_id, logprob, vocab_size=pool.engine.model.vocab_size)
