"""A preempted sample that comes back longer than decode may compute: its KV comes from a prefill instance once more."""

from __future__ import annotations

from decode_svc.attempts import Attempts
from decode_svc.decode_span import DecodeSpan
from decode_svc.failures import AttemptFailedError
from decode_svc.generate_rpc import GenerateRpc
from decode_svc.job import Job
from decode_svc.remote_prompt import RemotePrompt, paired_with
from engine.events import Readmitted
from kvtransfer.path import Destination


class Readmission:
    """Fills the blocks that the sample has now, while the other samples go on. `run` is its whole life; the sequence stays its owner's."""

    def __init__(self, rpc: GenerateRpc, job: Job, event: Readmitted, decode: DecodeSpan) -> None:
        """`job` is the sample behind all its tokens so far, every one of which has been sent."""
        self._rpc = rpc
        self._job = job
        self._sample_id = event.sample_id
        block_size = rpc.pool.engine.model.layout.block_size
        self._to = Destination(event.sample_id, event.block_ids, event.num_cached_blocks * block_size, job.num_tokens)
        self._decode = decode

    async def run(self) -> None:
        """Raises StatusError when no prefill instance could do it.

        Here it cannot be computed then: the engine asks only for more tokens than `max_local_prefill_tokens`, the others it computes without a word.
        """
        pool = self._rpc.pool
        attempts = Attempts(self._rpc, pool.peers.candidates(self._rpc.prefill_instance, pool.policy.max_prefill_attempts))
        while (peer := attempts.next_peer(self._job)) is not None:
            try:
                async with paired_with(peer, self._rpc) as paired:
                    await self._fill(RemotePrompt(self._rpc, peer, paired, self._job))
                return
            except AttemptFailedError as failure:
                attempts.failed(failure)
        raise attempts.error()

    async def _fill(self, prompt: RemotePrompt) -> None:
        try:
            await self._hand_over(prompt)
        except AttemptFailedError:
            # The next attempt writes into the same blocks.
            await prompt.stopped()
            raise

    async def _hand_over(self, prompt: RemotePrompt) -> None:
        async with prompt.opened() as call:
            computed = await prompt.computed(call, self._to)
            await prompt.confirmed(call, computed)
        prompt.record()
        # In front of the commit, behind which the engine tells the next ones.
        (first,) = computed.first
        await self._rpc.output.send(first.index, first.tokens, finish=first.finish)
        self._decode.sent(len(first.tokens))
        await self._rpc.pool.engine.commit(self._sample_id, first.tokens)
