"""The server interceptor: trace context, SERVER span, statuses, counters, and the list of running RPCs that a drain waits for.

OpenTelemetry's own aio server interceptor reports OK for abort_with_status, uncaught exceptions, deadlines and cancels, so it is not used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc._cython.cygrpc import ExecuteBatchError  # type: ignore[import-not-found] # grpc.aio does not export it
from opentelemetry import context as otel_context
from opentelemetry.trace import SpanKind

from rpc.deadline import HOP_MARGIN_S
from rpc.errors import StatusError, internal, invalid_argument, unavailable
from rpc.methods import begins_work, is_request, method_name
from telemetry.metrics import RpcMetrics
from telemetry.spans import RPC_METHOD, RPC_RESPONSE_STATUS_CODE, RPC_SYSTEM_NAME
from telemetry.tracing import SpanHandle, extract, span

_LOG = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour = Callable[[Any, Context], Any]

# The server's own faults; a refused or cancelled request is none.
SERVER_ERRORS: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_DRAIN_RETRY_S: Final = 1.0
_CANCEL_DELAY_S: Final = 1.0


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of one server. Handlers are coroutines or asynchronous generators; both end in the task that runs the RPC."""

    def __init__(self, metrics: RpcMetrics | None = None) -> None:
        self.draining = False
        self._metrics = metrics
        self._requests: set[asyncio.Task[Any]] = set()
        self._support: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_requests(self) -> int:
        """Request RPCs whose status has not been sent."""
        return len(self._requests)

    async def wait_for_requests(self, timeout_s: float) -> bool:
        """Waits until no request runs; False when `timeout_s` passed before."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def end_all(self) -> None:
        """Cancels every handler that runs; each RPC then ends with UNAVAILABLE DRAINING."""
        for task in (*self._requests, *self._support):
            self._ended.add(task)
            task.cancel()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]], details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Returns the method's handler, wrapped."""
        handler: Any = await continuation(details)
        if handler is None:
            return None  # grpc answers UNIMPLEMENTED; the name is the client's own and goes into no label
        method = method_name(details.method)
        kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
        behaviour: Behaviour = getattr(handler, kind)
        parse = None if handler.request_streaming else handler.request_deserializer

        async def wrapped(argument: Any, context: Context) -> Any:
            call = _Call(method, behaviour, argument, context, parse)
            del argument, context
            try:
                return await self._run(call)
            except grpc.aio.AbortError as aborted:
                # grpc keeps it in the RPC's state, which the frames of its traceback keep, and with it the request: a cycle of up to a whole message that
                # stays until a full collection (0.9 GB after 60 refused messages of 31 MiB).
                aborted.__traceback__ = aborted.__context__ = None
                del call
                raise

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        # A single request is parsed in the guard: grpc's own parsing answers bytes that are no message with UNKNOWN and a traceback in the log.
        return make(wrapped, handler.request_deserializer if parse is None else None, handler.response_serializer)  # type: ignore[no-any-return]

    async def _run(self, call: _Call) -> Any:
        method, context = call.method, call.context
        self._enter(method, context)
        started_s = time.monotonic()
        if self._metrics:
            self._metrics.started(method)
        try:
            if not is_request(method):
                return await self._guard(call)
            parent = extract(context.invocation_metadata() or ()) or otel_context.Context()
            attributes = {RPC_SYSTEM_NAME: "grpc", RPC_METHOD: method}
            with span(method, kind=SpanKind.SERVER, attributes=attributes, parent=parent, set_error=False) as handle:
                try:
                    return await self._guard(call)
                finally:
                    _set_status(handle, call.code)
        finally:
            if self._metrics:
                self._metrics.ended(method, call.code.name, time.monotonic() - started_s)

    def _enter(self, method: str, context: Context) -> None:
        task = asyncio.current_task()
        assert task is not None
        running = self._requests if is_request(method) else self._support
        running.add(task)
        if self._requests:
            self._idle.clear()

        def left(_: Any) -> None:
            # Called when the status has been sent, and not when the handler returned: a drain must not cut off the last status.
            running.discard(task)
            self._ended.discard(task)
            if not self._requests:
                self._idle.set()

        context.add_done_callback(left)  # type: ignore[arg-type] # any callable will do

    async def _guard(self, call: _Call) -> Any:
        """Runs the handler and ends the RPC with the right status, which is then `call.code`."""
        try:
            return await self._answer(call)
        except ExecuteBatchError:
            # The client went away while something was being sent to it, and its cancel comes a moment later. That is the end to pass on: grpc logs this
            # one with a traceback, for each client that leaves in the middle of a message.
            call.code = _end_of_client(call.context)
            if not _cancelling():
                await asyncio.sleep(_CANCEL_DELAY_S)
                raise
            raise asyncio.CancelledError from None

    async def _answer(self, call: _Call) -> Any:
        context = call.context
        try:
            if self.draining and begins_work(call.method):
                raise _draining()
            response = await _invoke(call)
            if _cancelling():
                raise asyncio.CancelledError  # the handler swallowed it; OK would make a cut stream look whole
            call.code = _code_of(context)
            return response
        except StatusError as error:
            await _abort(call, error)
        except DecodeError as error:
            await _abort(call, invalid_argument("request", f"is no message of this method: {error}"))
        except grpc.aio.AbortError:
            call.code = _code_of(context)
            raise
        except asyncio.CancelledError as error:
            await self._cancelled(call, error)
        except ExecuteBatchError:
            raise
        except Exception as error:
            if isinstance(error, NotImplementedError) and _code_of(context) is grpc.StatusCode.UNIMPLEMENTED:
                await _abort(call, StatusError(grpc.StatusCode.UNIMPLEMENTED, f"{call.method} is not implemented"))
            _LOG.exception("%s failed", call.method)
            await _abort(call, internal())

    async def _cancelled(self, call: _Call, error: asyncio.CancelledError) -> None:
        if asyncio.current_task() in self._ended:
            await _abort(call, _draining())
        if not _cancelling():
            # Nobody cancelled this RPC: the handler awaited something of its own that was. Without a status its client would wait.
            _LOG.error("%s let a cancel of its own escape", call.method, exc_info=error)
            await _abort(call, internal())
        call.code = _end_of_client(call.context)
        raise error


@dataclass(slots=True)
class _Call:
    method: str
    behaviour: Behaviour
    argument: Any
    context: Context
    parse: Callable[[bytes], Any] | None = None
    """Makes the argument of the bytes received; None: it is what the handler takes."""
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _invoke(call: _Call) -> Any:
    argument = call.argument if call.parse is None else call.parse(call.argument)
    result = call.behaviour(argument, call.context)
    if not hasattr(result, "__aiter__"):
        return await result
    # A generator left to grpc runs its `finally` late and in another task when a slow client is cancelled.
    async with aclosing(result) as messages:
        async for message in messages:
            await call.context.write(message)
    return None


async def _abort(call: _Call, error: StatusError) -> NoReturn:
    call.code = error.code
    await call.context.abort_with_status(error.to_status(tuple(call.context.trailing_metadata() or ())))


def _draining() -> StatusError:
    return unavailable("DRAINING", "the server is shutting down", _DRAIN_RETRY_S)


def _code_of(context: Context) -> grpc.StatusCode:
    code: grpc.StatusCode | int | None = context.code()
    return code if isinstance(code, grpc.StatusCode) else _CODES[code or 0]


def _end_of_client(context: Context) -> grpc.StatusCode:
    # The client's own deadline cancels the RPC a moment before the server's timer would.
    remaining: float | None = context.time_remaining()
    return grpc.StatusCode.DEADLINE_EXCEEDED if remaining is not None and remaining <= HOP_MARGIN_S else grpc.StatusCode.CANCELLED


def _set_status(handle: SpanHandle, code: grpc.StatusCode) -> None:
    handle.set_attribute(RPC_RESPONSE_STATUS_CODE, code.name)
    if code in SERVER_ERRORS:
        handle.fail(code.name)
