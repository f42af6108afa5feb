"""A completion that is read while it is generated, in asyncio."""

from __future__ import annotations

import asyncio
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc

from tandem.v1 import gateway_pb2
from tandem_client.completion import Completion
from tandem_client.failure import tandem_trailers
from tandem_client.generation import Generation, Open
from tandem_client.piece import Piece
from tandem_client.received import Received


class _Line:
    """The call in progress."""

    def __init__(self) -> None:
        self.call: Any = None
        self.closed = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    def put(self, call: Any) -> None:
        self.call, self.loop = call, asyncio.get_running_loop()
        if self.closed.is_set():
            call.cancel()

    def close(self) -> None:
        self.closed.set()
        if self.call is not None:
            self.call.cancel()

    def abandon(self) -> None:
        """From a finalizer, in whatever thread that runs."""
        if self.loop is not None and self.call is not None and not self.call.done():
            with suppress(RuntimeError):  # the loop is closed, and its connections with it
                self.loop.call_soon_threadsafe(self.call.cancel)


class AsyncStream(Received):
    """Iterates Pieces; read by one task, cancelled by any task of its loop.

    The request begins with `async with` or with the first piece, and leaving the `async with` ends it on the server, wherever it is. So does `cancel()`, a
    cancel of the task that reads, an exception out of the iteration, and, as the last net, the end of the object itself: `break` alone out of
    `async for piece in client.stream(...)` ends it when the last reference is gone. Use `async with`.
    """

    def __init__(self, generation: Generation, open_call: Open) -> None:
        super().__init__(generation)
        self._open = open_call
        self._line = _Line()
        weakref.finalize(self, self._line.abandon).atexit = False  # the process's end closes the connection

    async def __aenter__(self) -> Self:
        if self._line.call is None:
            self._begin()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        """Raises TandemError, the same one again when it is asked again."""
        try:
            piece = await self._next()
        except BaseException:
            self._line.close()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def cancel(self) -> None:
        """Ends the request on the server; whoever reads the stream gets Cancelled. Nothing happens to a stream that has ended."""
        self._line.close()

    async def completion(self) -> Completion:
        """Reads what is still to come, and returns the whole. Raises TandemError."""
        async for _ in self:
            pass
        return self._generation.completion()

    async def _next(self) -> Piece | None:
        generation, line = self._generation, self._line
        while not generation.has_ended:
            if line.closed.is_set():
                raise generation.cancelled()
            call = line.call or self._begin()
            try:
                message = await read(call)
            except grpc.aio.AioRpcError as error:
                await self._break(error)
                continue
            if message is None:
                generation.ended(tandem_trailers(await call.trailing_metadata()))
            elif (piece := generation.take(message)) is not None:
                return piece
        return None

    def _begin(self) -> Any:
        try:
            call = self._open(*self._generation.attempt())
        except (RuntimeError, grpc.aio.UsageError):  # of a client that is closed, which has closed the line first
            if self._line.closed.is_set():
                raise self._generation.cancelled() from None
            raise
        self._line.put(call)
        return call

    async def _break(self, error: grpc.aio.AioRpcError) -> None:
        """Waits until the next attempt is due, where one follows."""
        line = self._line
        if line.closed.is_set() and not self._generation.answer.complete:
            raise self._generation.cancelled() from None
        wait_s = self._generation.failed(error)
        line.call = None
        if wait_s is not None:
            await is_set_within(line.closed, wait_s)


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for the event, but no longer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


async def read(call: Any) -> gateway_pb2.GenerateResponse | None:
    """The next message, None at the end. Raises AioRpcError, also where grpc.aio shows a call that was cancelled as a cancel of this task, which it is not."""
    try:
        message = await call.read()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata()) from None
    return None if message is grpc.aio.EOF else message
