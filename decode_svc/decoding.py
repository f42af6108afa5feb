"""From an engine's events to messages: the part of a Generate RPC that lasts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from decode_svc.decode_span import DecodeSpan
from decode_svc.generate_rpc import GenerateRpc
from decode_svc.job import Job
from decode_svc.readmission import Readmission
from decode_svc.tasks import sample_tasks
from engine.async_engine import SequenceStream
from engine.events import Event, Failed, Finished, Preempted, Readmitted, Tokens
from engine.sampling_params import Finish, SampledToken
from tandem.v1 import decode_pb2
from worker.statuses import status_of


@dataclass(slots=True)
class _Piece:
    """What arrived of one sample: it goes out in one message."""

    tokens: list[SampledToken] = field(default_factory=list)
    finish: Finish | None = None


class Decoding:
    """What one engine sequence generates for a job's samples, from their first tokens on, until the last of them ends."""

    def __init__(self, rpc: GenerateRpc, job: Job, stream: SequenceStream, decode: DecodeSpan) -> None:
        self._rpc = rpc
        self._job = job
        self._stream = stream
        self._decode = decode
        self._in_engine = set(job.indices)
        """Samples that have not ended there."""
        self._readmitted: list[Readmitted] = []

    async def run(self) -> None:
        """Sends tokens until every sample has ended; those that are there together go in one message. Raises StatusError."""
        error: str | None = "cancelled"
        try:
            async with sample_tasks() as start:
                while True:
                    for event in self._readmitted:
                        start(self._readmission(event).run())
                    self._readmitted.clear()
                    if not self._in_engine:
                        break
                    await self.send(await self._stream.get())
            error = None
        finally:
            self._rpc.pool.metrics.request_decode_time_seconds.observe(self._decode.end(error))

    async def send(self, events: Iterable[Event], prompt: decode_pb2.PromptReport | None = None) -> None:
        """Sends what events of the engine say, and `prompt` with the first message. Raises StatusError for a sequence that failed."""
        for index, piece in self._pieces(events).items():
            if index in self._rpc.output.ended:
                continue  # with its first token, as prefill told it
            await self._rpc.output.send(index, piece.tokens, prompt=prompt, finish=piece.finish)
            self._decode.sent(len(piece.tokens))
            prompt = None

    def _pieces(self, events: Iterable[Event]) -> dict[int, _Piece]:
        pieces: defaultdict[int, _Piece] = defaultdict(_Piece)
        for event in events:
            match event:
                case Tokens():
                    pieces[self._job.index + event.index].tokens.extend(event.tokens)
                case Finished():
                    pieces[self._job.index + event.index].finish = event.finish
                    self._in_engine.discard(self._job.index + event.index)
                case Failed():
                    raise status_of(event.error)
                case Preempted():
                    self._decode.preempted(event.at_ns)
                case Readmitted():
                    self._readmitted.append(event)
                case _:
                    pass
        return pieces

    def _readmission(self, event: Readmitted) -> Readmission:
        index = self._job.index + event.index
        return Readmission(self._rpc, self._job.of_sample(index, self._rpc.output.token_ids[index]), event, self._decode)
