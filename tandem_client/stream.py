"""A completion that is read while it is generated."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any, Self

import grpc

from tandem_client.completion import Completion
from tandem_client.failure import tandem_trailers
from tandem_client.generation import Generation, Open
from tandem_client.piece import Piece
from tandem_client.received import Received


class _Line:
    """The call in progress. `close` comes from any thread, also from a finalizer in the middle of anything, so nothing here waits for a lock."""

    def __init__(self) -> None:
        self.call: Any = None
        self.closed = threading.Event()

    def put(self, call: Any) -> None:
        self.call = call
        if self.closed.is_set():  # it came while the call was made
            call.cancel()

    def close(self) -> None:
        self.closed.set()
        if self.call is not None:
            self.call.cancel()


class Stream(Received):
    """Iterates Pieces; read by one thread, cancelled by any.

    The request begins with `with` or with the first piece, and leaving the `with` ends it on the server, wherever it is. So does `cancel()`, an exception
    out of the iteration, and, as the last net, the end of the object itself: `for piece in client.stream(...)` that is left by `break` ends there and then,
    a stream that is kept in a variable ends when the variable does. Use `with`.
    """

    def __init__(self, generation: Generation, open_call: Open) -> None:
        super().__init__(generation)
        self._open = open_call
        self._line = _Line()
        weakref.finalize(self, self._line.close).atexit = False  # the process's end closes the connection

    def __enter__(self) -> Self:
        if self._line.call is None:
            self._begin()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        """Raises TandemError, the same one again when it is asked again."""
        try:
            piece = self._next()
        except BaseException:
            self._line.close()
            raise
        if piece is None:
            raise StopIteration
        return piece

    def cancel(self) -> None:
        """Ends the request on the server; whoever reads the stream gets Cancelled. Nothing happens to a stream that has ended."""
        self._line.close()

    def completion(self) -> Completion:
        """Reads what is still to come, and returns the whole. Raises TandemError."""
        for _ in self:
            pass
        return self._generation.completion()

    def _next(self) -> Piece | None:
        generation, line = self._generation, self._line
        while not generation.has_ended:
            if line.closed.is_set():
                raise generation.cancelled()
            call = line.call or self._begin()
            try:
                message = next(call)
            except StopIteration:
                generation.ended(tandem_trailers(call.trailing_metadata()))
            except grpc.RpcError as error:
                self._break(error)
            else:
                piece = generation.take(message)
                if piece is not None:
                    return piece
        return None

    def _begin(self) -> Any:
        try:
            call = self._open(*self._generation.attempt())
        except (RuntimeError, ValueError):  # of a client that another thread has closed, its lines first
            if self._line.closed.is_set():
                raise self._generation.cancelled() from None
            raise
        self._line.put(call)
        return call

    def _break(self, error: grpc.RpcError) -> None:
        """Waits until the next attempt is due, where one follows."""
        line = self._line
        if line.closed.is_set() and not self._generation.answer.complete:
            raise self._generation.cancelled() from None
        wait_s = self._generation.failed(error)
        line.call = None
        if wait_s is not None:
            line.closed.wait(wait_s)
