"""One Generate RPC: whose prompt is computed where, what happens when that fails, and the stream of tokens (design 3)."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from decode_svc.attempt import HandoverAttempt, compute_first_token
from decode_svc.failures import AttemptFailedError
from decode_svc.job import Job
from decode_svc.output import Output
from decode_svc.peers import PrefillPeer
from decode_svc.pool import DecodePool
from decode_svc.tokens import stream_local
from engine.errors import CapacityError
from engine.sequence import SequenceKind
from rpc.deadline import remaining_s
from rpc.errors import StatusError, failed_precondition, unavailable
from rpc.failpoints import failpoint
from tandem.v1 import decode_pb2
from telemetry import spans
from worker.progress import PromptProgress
from worker.statuses import engine_errors

_LOG = logging.getLogger(__name__)
_RETRY_S = 1.0


class Generation:
    """The state of one Generate RPC over all its attempts. `run` is its whole life."""

    def __init__(self, pool: DecodePool, job: Job, prefill_instance: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._pool = pool
        self._job = job
        self._first_instance = prefill_instance
        self._context = context
        self._output = Output(context, len(job.output_token_ids))
        self._failures: list[AttemptFailedError] = []
        self._no_room: CapacityError | None = None

    async def run(self) -> None:
        """Raises StatusError; whatever ends it, nothing stays reserved."""
        with engine_errors():
            if not self._first_instance:
                await self._compute_here(decode_pb2.PROMPT_PATH_LOCAL)
                return
            for peer in self._pool.peers.candidates(self._first_instance, self._pool.policy.max_prefill_attempts):
                if self._failures and not self._time_for_another():
                    break
                try:
                    await self._compute_at(peer)
                except AttemptFailedError as failure:
                    self._failed(failure)
                else:
                    return
            await self._fall_back()

    async def _compute_at(self, peer: PrefillPeer) -> None:
        job = self._job.resumed(self._output.token_ids)
        report = self._report(decode_pb2.PROMPT_PATH_HANDOVER, peer.name)
        if job.num_left <= 1:
            report.path = decode_pb2.PROMPT_PATH_PREFILL_ONLY
            await compute_first_token(self._pool, peer, job, self._output, report, self._context)
            return
        attempt = HandoverAttempt(self._pool, peer, job, self._output, report, self._context)
        try:
            await attempt.run()
        except CapacityError as error:
            if not self._failures:
                raise
            # The blocks of the attempt before are on their way back, or others took them: the queue of the engine waits for room, or the gateway's.
            self._no_room = error
            raise AttemptFailedError(peer.name, "NO_KV_BLOCKS", str(error)) from error

    def _failed(self, failure: AttemptFailedError) -> None:
        self._failures.append(failure)
        _LOG.warning("attempt %d at a hand-over failed (%s): %s", len(self._failures), failure.reason, failure)
        self._pool.metrics.kv_transfer_failures(failure.reason).inc()

    def _time_for_another(self) -> bool:
        left = remaining_s(self._context, self._pool.max_request_time_s)
        return left > self._pool.pace.predict_s(self._job.num_tokens + len(self._output.token_ids))

    async def _fall_back(self) -> None:
        """Computes the prompt here if the policy lets it, else says why not."""
        if not any(failure.pairs for failure in self._failures):
            text = "; ".join(map(str, self._failures))
            raise failed_precondition(text, {failure.instance: failure.description for failure in self._failures})
        num_tokens = self._job.num_tokens + len(self._output.token_ids)
        if num_tokens > self._pool.policy.max_local_prefill_tokens or not self._time_for_another():
            raise self._no_room if self._no_room is not None and not self._output.token_ids else self._hand_over_failed()
        await self._compute_here(decode_pb2.PROMPT_PATH_LOCAL_FALLBACK)

    def _hand_over_failed(self) -> StatusError:
        return unavailable("HANDOVER_FAILED", f"{len(self._failures)} attempts failed: {'; '.join(map(str, self._failures))}", _RETRY_S)

    def _report(self, path: decode_pb2.PromptPath, instance: str = "") -> decode_pb2.PromptReport:
        return decode_pb2.PromptReport(path=path, prefill_instance=instance, num_failed_attempts=len(self._failures))

    async def _compute_here(self, path: decode_pb2.PromptPath) -> None:
        job = self._job.resumed(self._output.token_ids)
        spec = job.spec(SequenceKind.LOCAL)
        progress = PromptProgress()
        try:
            await failpoint(spans.PREFILL_QUEUE)
            stream = self._pool.engine.submit(spec)
            self._output.handed_over(decode_pb2.HandoverReport())
            await stream_local(self._pool, self._output, stream, self._report(path), progress)
        finally:
            progress.abandon()
            self._pool.engine.release(spec.seq_id)
