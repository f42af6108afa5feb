"""A job whose prompt this engine computes itself."""

from __future__ import annotations

from decode_svc.computed_prompt import count_path
from decode_svc.decode_span import DecodeSpan
from decode_svc.decoding import Decoding
from decode_svc.generate_rpc import GenerateRpc
from decode_svc.job import Job
from engine.async_engine import SequenceStream
from engine.events import Event, Failed, Finished, PromptLogprobs, Scheduled, Tokens
from engine.proto import token_to_proto
from engine.sequence import SequenceKind
from rpc.failpoints import failpoint
from tandem.v1 import decode_pb2
from telemetry import spans
from worker.progress import PromptProgress
from worker.statuses import status_of


class LocalPrompt:
    """Queue, compute, decode. `run` is its whole life."""

    def __init__(self, rpc: GenerateRpc, job: Job, report: decode_pb2.PromptReport) -> None:
        self._rpc = rpc
        self._job = job
        self._report = report
        self._spec = job.spec(SequenceKind.LOCAL, rpc.max_recompute_tokens)

    async def run(self) -> None:
        """Raises StatusError; gives everything back in any case."""
        try:
            async with self._rpc.prompt_turn:
                decoding = await self._compute()
            await decoding.run()
        finally:
            self._rpc.pool.engine.release(self._spec.seq_id)

    async def _compute(self) -> Decoding:
        """Returns when the first tokens have gone out."""
        progress = PromptProgress()
        try:
            await failpoint(spans.PREFILL_QUEUE)
            stream = self._rpc.pool.engine.submit(self._spec)
            self._rpc.output.handed_over(decode_pb2.HandoverReport())
            events = await self._first_events(stream, progress)
            await failpoint(spans.PREFILL)
            progress.end()
        finally:
            progress.abandon()
        self._rpc.pool.metrics.request_prefill_time_seconds.observe(progress.prefill_s)
        self._report.cached_tokens = progress.cached_tokens
        decode = DecodeSpan(self._rpc.trace)
        decoding = Decoding(self._rpc, self._job, stream, decode)
        await failpoint(spans.DECODE)
        await decoding.send(events, self._report)
        count_path(self._rpc.pool, self._report)
        return decoding

    async def _first_events(self, stream: SequenceStream, progress: PromptProgress) -> list[Event]:
        """Tells of the prompt until it is computed; returns the events that have the first tokens among them."""
        while True:
            events = await stream.get()
            for event in events:
                progress.take(event)
                await self._take(event)
            if any(isinstance(event, Tokens | Finished) for event in events):
                return events

    async def _take(self, event: Event) -> None:
        output = self._rpc.output
        match event:
            case Scheduled():
                await output.reservation(num_charged_blocks=event.num_charged_blocks, num_blocks=len(event.block_ids), cached_tokens=event.cached_tokens)
            case PromptLogprobs():
                await output.prompt_logprobs([token_to_proto(token) for token in event.logprobs])
            case Failed():
                raise status_of(event.error)
            case _:
                pass
