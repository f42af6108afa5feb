"""What a Generate RPC sends: messages in order, positions without a gap, each report once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from engine.proto import finish_to_proto, token_to_proto
from engine.sampling_params import Finish, SampledToken
from tandem.v1 import decode_pb2

_MAX_TOKENS_PER_MESSAGE = 256
"""With 20 alternatives each some 100 KB: far below the largest message that a gateway takes."""


class Output:
    """Writes one RPC's responses and remembers the tokens sent."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], position: int) -> None:
        self.token_ids: list[int] = []
        """Tokens sent by this RPC."""
        self._context = context
        self._position = position
        self._reservation: decode_pb2.Reservation | None = None
        self._handover: decode_pb2.HandoverReport | None = None

    async def reservation(self, *, num_charged_blocks: int, num_blocks: int, cached_tokens: int) -> None:
        """Sends what was reserved; a later attempt's reservation only when it is another one."""
        reservation = decode_pb2.Reservation(num_charged_blocks=num_charged_blocks, num_blocks=num_blocks, cached_tokens=cached_tokens)
        if reservation == self._reservation:
            return
        self._reservation = reservation
        await self._context.write(decode_pb2.DecodeServiceGenerateResponse(reservation=reservation))

    def handed_over(self, report: decode_pb2.HandoverReport) -> None:
        """Goes out with the next message."""
        self._handover = report

    async def send(self, tokens: Sequence[SampledToken], *, prompt: decode_pb2.PromptReport | None = None, finish: Finish | None = None) -> None:
        """Sends tokens that are there together in one message, or in a few when a slow reader let many pile up; the last message has the finish."""
        while len(tokens) > _MAX_TOKENS_PER_MESSAGE:
            await self._send(tokens[:_MAX_TOKENS_PER_MESSAGE], prompt, None)
            tokens, prompt = tokens[_MAX_TOKENS_PER_MESSAGE:], None
        await self._send(tokens, prompt, finish)

    async def _send(self, tokens: Sequence[SampledToken], prompt: decode_pb2.PromptReport | None, finish: Finish | None) -> None:
        response = decode_pb2.DecodeServiceGenerateResponse(
            token_ids=[token.token_id for token in tokens],
            logprobs=[token_to_proto(token) for token in tokens if token.logprob is not None],
            position=self._position + len(self.token_ids),
            prompt=prompt,
            handover=self._handover,
            finish=finish_to_proto(finish) if finish else None,
        )
        self._handover = None
        await self._context.write(response)
        self.token_ids.extend(response.token_ids)
