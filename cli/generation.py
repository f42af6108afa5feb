"""One Generate call seen from the client: its text, and what can be measured from outside."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from cli.errors import UserError
from rpc.errors import StatusError
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2

DEFAULT_GATEWAY = "127.0.0.1:50051"


def gateway_target(given: str | None) -> str:
    """The flag, or TANDEM_GATEWAY, or the default port on this machine."""
    return given or os.environ.get("TANDEM_GATEWAY") or DEFAULT_GATEWAY


def chat_request(
    messages: list[tuple[str, str]], sampling: generation_pb2.SamplingParams, *, request_id: str = "", model: str = ""
) -> gateway_pb2.GenerateRequest:
    """A request for the answer to (role, content) turns."""
    turns = [gateway_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return gateway_pb2.GenerateRequest(request_id=request_id, model=model, chat=gateway_pb2.ChatMessages(messages=turns), sampling_params=sampling)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message adds to one sample; the last one of a sample is marked."""

    index: int
    text: str
    last: bool


@dataclass(slots=True)
class Generation:
    """A call and its measurements; times are time.monotonic() seconds. `stream` is consumed once."""

    request: gateway_pb2.GenerateRequest
    started: float = 0.0
    first_token: float | None = None
    ended: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Time from each message with tokens to the same sample's next."""
    num_output_tokens: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    """By sample."""
    usage: generation_pb2.Usage | None = None
    finish: generation_pb2.Finish | None = None
    """Of the sample that ended last."""
    trailers: Mapping[str, str] = field(default_factory=dict)
    """Trailing metadata whose keys start with tandem-, without that prefix."""
    _last: dict[int, float] = field(default_factory=dict)
    """When a sample's last tokens came."""

    async def stream(self, channel: grpc.aio.Channel, *, timeout_s: float | None = None) -> AsyncGenerator[Piece, None]:
        """Yields text as it comes, and each sample's end. Raises StatusError.

        Leaving it early, by any way, cancels the call: close it, since `break` alone does not.
        """
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        self.started = time.monotonic()
        call = stub.Generate(self.request, timeout=timeout_s)
        try:
            async for response in call:
                piece = self._take(response)
                if piece.text or piece.last:
                    yield piece
            self.ended = time.monotonic()
            self.trailers = _tandem_trailers(await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            self.ended = time.monotonic()
            self.trailers = _tandem_trailers(error.trailing_metadata())
            raise StatusError.of(error) from None
        finally:
            call.cancel()

    def _take(self, response: gateway_pb2.GenerateResponse) -> Piece:
        if response.token_ids:
            self._note_tokens(response.index, len(response.token_ids))
        if response.HasField("finish"):
            self.finish = response.finish
        if response.HasField("usage"):
            self.usage = response.usage
        self.texts[response.index] = self.texts.get(response.index, "") + response.text
        return Piece(response.index, response.text, response.HasField("finish"))

    def _note_tokens(self, index: int, num_tokens: int) -> None:
        now = time.monotonic()
        self.num_output_tokens += num_tokens
        if self.first_token is None:
            self.first_token = now
        if index in self._last:
            self.gaps_s.append(now - self._last[index])
        self._last[index] = now

    @property
    def text(self) -> str:
        """The first sample's."""
        return self.texts.get(0, "")

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the call to the first token."""
        return None if self.first_token is None else self.first_token - self.started

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens over the whole time of the call."""
        return None if self.ended is None else self.num_output_tokens / (self.ended - self.started)


def _tandem_trailers(metadata: Any) -> dict[str, str]:
    return {key.removeprefix("tandem-"): value for key, value in metadata or () if key.startswith("tandem-") and isinstance(value, str)}


def told(error: StatusError, target: str) -> UserError:
    """The error in words for a terminal."""
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
        return UserError(f"gateway {target} cannot be reached ({error.message.rsplit(': ', 1)[-1]}); `tandem up` starts one", exit_code=2)
    reason = f" {error.reason}" if error.reason and error.reason != error.code.name else ""
    retry = f"; try again in {error.retry_after_s:g} s" if error.retry_after_s is not None else ""
    sent = f" (after {error.trailers['tandem-tokens-sent']} tokens)" if "tandem-tokens-sent" in error.trailers else ""
    return UserError(f"{error.code.name}{reason}: {error.message}{sent}{retry}")
