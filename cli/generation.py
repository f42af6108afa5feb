"""One call of a gateway seen from the client: its text, and what can be measured from outside."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import grpc

from cli.errors import UserError
from tandem_client import AsyncClient, ChatMessage, Options, Piece, RequestPath, RetryPolicy, TandemError, Usage

DEFAULT_GATEWAY = "127.0.0.1:50051"


def gateway_target(given: str | None) -> str:
    """The flag, or TANDEM_GATEWAY, or the default port on this machine."""
    return given or os.environ.get("TANDEM_GATEWAY") or DEFAULT_GATEWAY


def gateway_client(target: str) -> AsyncClient:
    """A client that tries once: who sits at a terminal hears at once what is wrong, and what is measured is one call."""
    return AsyncClient(target, retry=RetryPolicy.never())


@dataclass(slots=True)
class Generation:
    """A call and its measurements; times are time.monotonic() seconds. `stream` is consumed once."""

    prompt: str | Sequence[ChatMessage]
    """A plain text, or a conversation."""
    options: Options
    started: float = 0.0
    first_token: float | None = None
    ended: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Time from each message with tokens to the same sample's next."""
    num_output_tokens: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    """By sample."""
    usage: Usage | None = None
    path: RequestPath = field(default_factory=RequestPath)
    _last: dict[int, float] = field(default_factory=dict)
    """When a sample's last tokens came."""

    async def stream(self, client: AsyncClient) -> AsyncGenerator[Piece, None]:
        """Yields text as it comes, and each sample's end. Raises TandemError.

        Leaving it early, by any way, cancels the call: close it, since `break` alone does not.
        """
        self.started = time.monotonic()
        opened = client.stream(self.prompt, **self.options) if isinstance(self.prompt, str) else client.stream_chat(self.prompt, **self.options)
        try:
            async with opened as stream:
                async for piece in stream:
                    self._note(piece)
                    if piece.text or piece.finish is not None:
                        yield piece
                completion = await stream.completion()
        except TandemError as error:
            self.ended = time.monotonic()
            self.path = RequestPath.of(error.failure.trailers)
            raise
        self.ended = time.monotonic()
        self.usage, self.path = completion.usage, completion.path

    def _note(self, piece: Piece) -> None:
        self.texts[piece.index] = self.texts.get(piece.index, "") + piece.text
        if not piece.token_ids:
            return
        now = time.monotonic()
        self.num_output_tokens += len(piece.token_ids)
        if self.first_token is None:
            self.first_token = now
        if piece.index in self._last:
            self.gaps_s.append(now - self._last[piece.index])
        self._last[piece.index] = now

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


def told(error: TandemError, target: str) -> UserError:
    """The error in words for a terminal."""
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason and not error.tokens_sent:
        return UserError(f"gateway {target} cannot be reached ({error.message.rsplit(': ', 1)[-1]}); `tandem up` starts one", exit_code=2)
    retry_after_s = error.failure.retry_after_s
    return UserError(f"{error}{'' if retry_after_s is None else f'; try again in {retry_after_s:g} s'}")
