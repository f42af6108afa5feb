"""One attempt to have a job's prompt computed by one prefill instance."""

from __future__ import annotations

import asyncio

from decode_svc.computed_prompt import ComputedPrompt, ask, take
from decode_svc.decode_span import DecodeSpan
from decode_svc.decoding import Decoding
from decode_svc.failures import attempt_at, is_own_cancel
from decode_svc.generate_rpc import GenerateRpc
from decode_svc.job import Job
from decode_svc.peers import PrefillPeer
from decode_svc.prefill_call import PrefillCall, prefill_call
from decode_svc.remote_prompt import RemotePrompt, paired_with
from engine.async_engine import ReservedSequence
from engine.sequence import SequenceKind
from kvtransfer.path import Destination
from rpc.failpoints import failpoint
from tandem.v1 import decode_pb2
from telemetry import spans
from telemetry.tracing import span


class HandoverAttempt:
    """Reserve, have it computed, copy, confirm, decode. `run` is its whole life."""

    def __init__(self, rpc: GenerateRpc, peer: PrefillPeer, job: Job, report: decode_pb2.PromptReport) -> None:
        self._rpc = rpc
        self._peer = peer
        self._job = job
        self._report = report
        self._spec = job.spec(SequenceKind.REMOTE_KV, rpc.max_recompute_tokens)

    async def run(self) -> None:
        """Raises AttemptFailedError when another attempt may do better, StatusError, CapacityError; gives everything back in any case."""
        try:
            # In front of the reservation, which would be idle while a pairing is waited for.
            async with self._rpc.prompt_turn, paired_with(self._peer, self._rpc) as paired:
                prompt = RemotePrompt(self._rpc, self._peer, paired, self._job)
                # The RPC's way to prefill takes longer than the reservation; nothing is asked before that is there.
                async with prompt.opened() as call:
                    reserved = await self._reserve()
                    decode = await self._hand_over(reserved, prompt, call)
                if decode is not None:
                    self._rpc.output.handed_over(prompt.record())
            if decode is not None:
                await Decoding(self._rpc, self._job, reserved.stream, decode).run()
        finally:
            self._rpc.pool.engine.release(self._spec.seq_id)

    async def _reserve(self) -> ReservedSequence:
        engine = self._rpc.pool.engine
        with span(spans.RESERVE, parent=self._rpc.trace) as handle:
            await failpoint(spans.RESERVE)
            reserved = await engine.reserve(self._spec)
            handle.set_attribute(spans.NUM_BLOCKS, len(reserved.block_ids))
            handle.set_attribute(spans.NUM_CHARGED_BLOCKS, reserved.num_charged_blocks)
        return reserved

    async def _hand_over(self, reserved: ReservedSequence, prompt: RemotePrompt, call: PrefillCall) -> DecodeSpan | None:
        """Returns when the copy is valid and the samples decode; None when every first token was the last."""
        engine, output = self._rpc.pool.engine, self._rpc.output
        num_cached_tokens = reserved.num_cached_blocks * engine.model.layout.block_size
        to = Destination(self._spec.seq_id, reserved.block_ids, num_cached_tokens, self._job.num_tokens)

        async def tell_reservation() -> None:
            charged, num_blocks = reserved.num_charged_blocks, len(reserved.block_ids)
            await output.reservation(num_charged_blocks=charged, num_blocks=num_blocks, cached_tokens=num_cached_tokens)

        computed = await prompt.computed(call, to, tell_reservation)
        decode = DecodeSpan(self._rpc.trace)
        try:
            if computed.ends:
                output.handed_over(decode_pb2.HandoverReport())
                await computed.send(self._rpc, self._report, decode)
                decode.end()
                return None
            await self._send_and_confirm(call, prompt, computed, decode)
            await engine.commit(self._spec.seq_id, tuple(token for first in computed.first for token in first.tokens))
        except BaseException as error:
            decode.end(type(error).__name__)
            raise
        return decode

    async def _send_and_confirm(self, call: PrefillCall, prompt: RemotePrompt, computed: ComputedPrompt, decode: DecodeSpan) -> None:
        """The first tokens go out at once, and the hand-over is confirmed meanwhile: a slow client must not keep prefill's blocks."""
        sending = asyncio.ensure_future(computed.send(self._rpc, self._report, decode))
        try:
            await prompt.confirmed(call, computed)
        except BaseException:
            if is_own_cancel():
                sending.cancel()
            else:
                # The tokens are on their way and cannot be taken back: what follows must know that the client has them. Prefill's blocks need not wait for it.
                call.cancel()
                await sending
            raise
        await sending


async def compute_first_tokens(rpc: GenerateRpc, peer: PrefillPeer, job: Job, report: decode_pb2.PromptReport) -> None:
    """At most one token a sample is wanted: nothing is reserved here and nothing is copied. Raises AttemptFailedError, StatusError."""
    await rpc.output.reservation(num_charged_blocks=0, num_blocks=0, cached_tokens=0)
    async with paired_with(peer, rpc) as paired:
        with attempt_at(peer.name, rpc.context, resumes=bool(job.output_token_ids)), prefill_call(peer, paired, rpc.timeout_s()) as call:
            computed = await take(call, rpc.pool, job, await ask(call, job, paired))
            await call.end()
    rpc.output.handed_over(decode_pb2.HandoverReport())
    decode = DecodeSpan(rpc.trace)
    await computed.send(rpc, report, decode)
    decode.end()
