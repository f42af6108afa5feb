"""A streamed answer put together again, for doors that answer in one message."""

from __future__ import annotations

from dataclasses import dataclass, field

from rpc.channels import MAX_MESSAGE_BYTES
from rpc.errors import exhausted
from tandem.v1 import gateway_pb2


@dataclass(slots=True)
class Room:
    """What one message holds. Streams that are answered together share it."""

    _num_bytes: int = 0

    def take(self, piece: gateway_pb2.GenerateResponse) -> None:
        """Raises StatusError once the whole would be more than a message may be: nobody could take it."""
        self._num_bytes += piece.ByteSize() - len(piece.request_id)
        if self._num_bytes > MAX_MESSAGE_BYTES:
            raise exhausted("MESSAGE_TOO_LARGE", f"the whole answer is above the {MAX_MESSAGE_BYTES >> 20} MiB of a message; ask for a stream", None)


@dataclass(slots=True)
class WholeAnswer:
    """Takes the pieces of a stream in order, as long as they fit into one message."""

    _room: Room = field(default_factory=Room)
    _response: gateway_pb2.GenerateUnaryResponse = field(default_factory=gateway_pb2.GenerateUnaryResponse)
    _choices: dict[int, gateway_pb2.Choice] = field(default_factory=dict)
    _texts: dict[int, list[str]] = field(default_factory=dict)

    async def add(self, piece: gateway_pb2.GenerateResponse) -> None:
        """As `take`, for where messages are written."""
        self.take(piece)

    def take(self, piece: gateway_pb2.GenerateResponse) -> None:
        """Takes the next piece. Raises StatusError when there is no room for it."""
        self._room.take(piece)
        response = self._response
        response.request_id = piece.request_id
        response.prompt_logprobs.extend(piece.prompt_logprobs)
        response.prompt_token_ids.extend(piece.prompt_token_ids)
        if piece.HasField("seed"):
            response.seed, response.model = piece.seed, piece.model
        if piece.HasField("usage"):
            response.usage.CopyFrom(piece.usage)
        if not piece.prompt_logprobs:
            self._add_to_choice(piece)

    def response(self) -> gateway_pb2.GenerateUnaryResponse:
        """All of it, samples in order."""
        for index, choice in sorted(self._choices.items()):
            choice.text = "".join(self._texts[index])
            self._response.choices.append(choice)
        return self._response

    def _add_to_choice(self, piece: gateway_pb2.GenerateResponse) -> None:
        choice = self._choices.setdefault(piece.index, gateway_pb2.Choice(index=piece.index))
        self._texts.setdefault(piece.index, []).append(piece.text)
        choice.token_ids.extend(piece.token_ids)
        choice.logprobs.extend(piece.logprobs)
        if piece.HasField("finish"):
            choice.finish.CopyFrom(piece.finish)
