"""What a Generate RPC sends: messages in order, each sample's positions without a gap, each report once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from engine.proto import finish_to_proto, token_to_proto
from engine.sampling_params import Finish, SampledToken
from tandem.v1 import decode_pb2, generation_pb2
from worker.pieces import pieces


class Output:
    """Writes one RPC's responses, for tasks of several samples, and remembers what each sample has sent."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], *, num_samples: int = 1, output_token_ids: Sequence[int] = ()) -> None:
        """`output_token_ids` have been sent before this RPC, by its one sample."""
        self.token_ids: tuple[list[int], ...] = tuple(list(output_token_ids) for _ in range(num_samples))
        """Tokens sent, by sample; those from before this RPC included."""
        self.ended: set[int] = set()
        """Samples whose finish has been sent."""
        self._context = context
        self._reservation: decode_pb2.Reservation | None = None
        self._handover: decode_pb2.HandoverReport | None = None
        self._handover_told = False
        self.has_sent = False
        """A sample has sent something."""
        self._writing = asyncio.Lock()

    async def reservation(self, *, num_charged_blocks: int, num_blocks: int, cached_tokens: int) -> None:
        """Sends what was reserved; a later attempt's reservation only when it is another one, and in front of any token."""
        reservation = decode_pb2.Reservation(num_charged_blocks=num_charged_blocks, num_blocks=num_blocks, cached_tokens=cached_tokens)
        if reservation == self._reservation or self.has_sent:
            return
        self._reservation = reservation
        await self._write(decode_pb2.DecodeServiceGenerateResponse(reservation=reservation))

    def handed_over(self, report: decode_pb2.HandoverReport) -> None:
        """Goes out with the next message; of several samples' hand-overs the first one's, which moved what the others share."""
        if not self._handover_told:
            self._handover, self._handover_told = report, True

    async def prompt_logprobs(self, entries: Sequence[generation_pb2.TokenLogprob]) -> None:
        """Sends log probabilities of the prompt's next tokens, in front of any token of a sample."""
        for piece in pieces(entries):
            await self._write(decode_pb2.DecodeServiceGenerateResponse(prompt_logprobs=piece))

    async def send(self, index: int, tokens: Sequence[SampledToken], *, prompt: decode_pb2.PromptReport | None = None, finish: Finish | None = None) -> None:
        """Sends a sample's tokens that are there together in one message, or in a few when a slow reader let many pile up; the last message has the finish."""
        parts = list(pieces(tokens)) or [()]
        for part in parts[:-1]:
            await self._send(index, part, prompt, None)
            prompt = None
        await self._send(index, parts[-1], prompt, finish)
        if finish is not None:
            self.ended.add(index)

    async def _send(self, index: int, tokens: Sequence[SampledToken], prompt: decode_pb2.PromptReport | None, finish: Finish | None) -> None:
        self.has_sent = True
        response = decode_pb2.DecodeServiceGenerateResponse(
            token_ids=[token.token_id for token in tokens],
            logprobs=[token_to_proto(token) for token in tokens if token.logprob is not None],
            position=len(self.token_ids[index]),
            prompt=prompt,
            handover=self._handover,
            finish=finish_to_proto(finish) if finish else None,
            index=index,
        )
        self._handover = None
        await self._write(response)
        self.token_ids[index].extend(response.token_ids)

    async def _write(self, response: decode_pb2.DecodeServiceGenerateResponse) -> None:
        async with self._writing:  # gRPC takes one message at a time
            await self._context.write(response)
