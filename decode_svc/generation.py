"""One Generate RPC: whose prompt is computed where, what happens when that fails, and the stream of tokens (design 3)."""

from __future__ import annotations

from typing import Any

import grpc

from decode_svc.attempt import HandoverAttempt, compute_first_tokens
from decode_svc.attempts import Attempts
from decode_svc.failures import AttemptFailedError
from decode_svc.generate_rpc import GenerateRpc
from decode_svc.job import Job
from decode_svc.local import LocalPrompt
from decode_svc.output import Output
from decode_svc.peers import PrefillPeer
from decode_svc.pool import DecodePool
from decode_svc.tasks import sample_tasks
from engine.errors import CapacityError
from tandem.v1 import decode_pb2
from worker.statuses import engine_errors


class Generation:
    """The state of one Generate RPC over all its attempts. `run` is its whole life."""

    def __init__(self, pool: DecodePool, job: Job, prefill_instance: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        output = Output(context, num_samples=job.sampling.n, output_token_ids=job.output_token_ids)
        self._rpc = GenerateRpc(pool, context, output, prefill_instance)
        self._job = job

    async def run(self) -> None:
        """Raises StatusError; whatever ends it, nothing stays reserved."""
        pool, first = self._rpc.pool, self._rpc.prefill_instance
        peers = pool.peers.candidates(first, pool.policy.max_prefill_attempts) if first else []
        with engine_errors():
            await self._generate(self._job, Attempts(self._rpc, peers))

    async def _generate(self, job: Job, attempts: Attempts) -> None:
        """Attempts a job; what a failed attempt has left of it goes on: the whole, or, behind tokens that were sent, each sample by itself."""
        try:
            await self._attempt(job, attempts)
            return
        except AttemptFailedError as failure:
            attempts.failed(failure)
        async with sample_tasks() as start:
            for each in self._left_of(job):
                start(self._generate(each, attempts.copy()))

    def _left_of(self, job: Job) -> list[Job]:
        output = self._rpc.output
        if not any(len(output.token_ids[index]) > len(job.output_token_ids) for index in job.indices):
            return [job]
        return [job.of_sample(index, output.token_ids[index]) for index in job.indices if index not in output.ended]

    async def _attempt(self, job: Job, attempts: Attempts) -> None:
        """The next one that the policy has for the job. Raises AttemptFailedError, StatusError, EngineError."""
        peer = attempts.next_peer(job)
        if peer is not None:
            await self._compute_at(peer, job, attempts)
        elif not attempts.failures:
            await LocalPrompt(self._rpc, job, _report(decode_pb2.PROMPT_PATH_LOCAL, attempts)).run()
        else:
            attempts.check_local(job)
            await LocalPrompt(self._rpc, job, _report(decode_pb2.PROMPT_PATH_LOCAL_FALLBACK, attempts)).run()

    async def _compute_at(self, peer: PrefillPeer, job: Job, attempts: Attempts) -> None:
        if job.num_left <= 1:
            await compute_first_tokens(self._rpc, peer, job, _report(decode_pb2.PROMPT_PATH_PREFILL_ONLY, attempts, peer.name))
            return
        try:
            await HandoverAttempt(self._rpc, peer, job, _report(decode_pb2.PROMPT_PATH_HANDOVER, attempts, peer.name)).run()
        except CapacityError as error:
            if not attempts.failures:
                raise
            # The blocks of the attempt before are on their way back, or others took them: the queue of the engine waits for room, or the gateway's.
            attempts.no_room = error
            raise AttemptFailedError(peer.name, "NO_KV_BLOCKS", str(error)) from error


def _report(path: decode_pb2.PromptPath, attempts: Attempts, instance: str = "") -> decode_pb2.PromptReport:
    return decode_pb2.PromptReport(path=path, prefill_instance=instance, num_failed_attempts=len(attempts.failures))
