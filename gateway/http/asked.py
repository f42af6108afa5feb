"""What an HTTP body asks for, and how its answer will look: the seam between OpenAI's shapes and the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tandem.v1 import gateway_pb2

Json = dict[str, Any]


class HttpAnswer(Protocol):
    """Makes OpenAI's shapes of the gateway's messages. Messages of one prompt come in order; those of several may mix."""

    def take(self, prompt: int, response: gateway_pb2.GenerateResponse) -> list[Json]:
        """The chunks that one message of one prompt's stream becomes; of an answer that is not streamed: none. Raises StatusError when that grows too large."""

    def last(self) -> list[Json]:
        """Chunks behind the last message of all prompts: with include_usage the usage."""

    def whole(self) -> Json:
        """The body of an answer that is not streamed, once everything was taken."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request, checked as far as its own shape goes."""

    requests: tuple[gateway_pb2.GenerateRequest, ...]
    """One for each prompt of the body, each with a request id of its own."""
    stream: bool
    answer: HttpAnswer
