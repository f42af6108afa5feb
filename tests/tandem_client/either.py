"""Both clients under one asyncio surface, so that each claim is tested of both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar, cast

from tandem_client import AsyncClient, AsyncStream, Choice, Client, Completion, Finish, GatewayStatus, Model, Piece, Stream, Usage

T = TypeVar("T")
KINDS = ("sync", "asyncio")


class EitherStream:
    """A stream of either kind; the sync one is read in a thread."""

    def __init__(self, stream: Stream | AsyncStream) -> None:
        self.stream = stream

    async def __aenter__(self) -> Self:
        if isinstance(self.stream, AsyncStream):
            await self.stream.__aenter__()
        else:
            self.stream.__enter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if isinstance(self.stream, AsyncStream):
            await self.stream.__aexit__(None, None, None)
        else:
            self.stream.__exit__(None, None, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        if isinstance(self.stream, AsyncStream):
            return await anext(self.stream)
        piece = await asyncio.to_thread(next, self.stream, None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def completion(self) -> Completion:
        if isinstance(self.stream, AsyncStream):
            return await self.stream.completion()
        return await asyncio.to_thread(self.stream.completion)

    def cancel(self) -> None:
        self.stream.cancel()

    @property
    def request_id(self) -> str:
        return self.stream.request_id

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self.stream.choices

    @property
    def seed(self) -> int:
        return self.stream.seed

    @property
    def finish(self) -> Finish:
        return self.stream.finish

    @property
    def usage(self) -> Usage:
        return self.stream.usage


class Either:
    """A client of either kind."""

    def __init__(self, kind: str, target: str, **terms: Any) -> None:
        self.client: Client | AsyncClient = Client(target, **terms) if kind == "sync" else AsyncClient(target, **terms)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._call(self.client.close)

    async def generate(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        return await self._call(lambda: self.client.generate(prompt, **options))

    async def chat(self, messages: Sequence[Any], **options: Any) -> Completion:
        return await self._call(lambda: self.client.chat(messages, **options))

    async def models(self, **options: Any) -> tuple[Model, ...]:
        return await self._call(lambda: self.client.models(**options))

    async def status(self, **options: Any) -> GatewayStatus:
        return await self._call(lambda: self.client.status(**options))

    def stream(self, prompt: str | Sequence[int], **options: Any) -> EitherStream:
        return EitherStream(self.client.stream(prompt, **options))

    def stream_chat(self, messages: Sequence[Any], **options: Any) -> EitherStream:
        return EitherStream(self.client.stream_chat(messages, **options))

    async def _call(self, call: Callable[[], T | Awaitable[T]]) -> T:
        """In a thread, or here: then it is a coroutine that the call returns."""
        if isinstance(self.client, AsyncClient):
            return await cast("Awaitable[T]", call())
        return cast("T", await asyncio.to_thread(call))
