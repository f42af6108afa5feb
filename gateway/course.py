"""One request's course through the gateway: tokenize, wait, route, stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import cast

import grpc

from gateway.admission import Admission, Refused, Ticket
from gateway.answer import Answer
from gateway.completion import BrokenStreamError
from gateway.failures import client_status, is_short_of_room, may_go_elsewhere, refusal_status
from gateway.limits import RequestLimits
from gateway.permits import Permits
from gateway.pools import Pools
from gateway.progress import Progress
from gateway.prompt import bad_words_ids, echoed_text, prompt_token_ids
from gateway.resolved_request import ResolvedRequest, resolve
from gateway.router import Demand, Route
from gateway.served_model import ServedModel
from rpc.client import outgoing
from rpc.deadline import HOP_MARGIN_S, next_hop_s
from rpc.errors import StatusError, exhausted, internal
from rpc.failpoints import failpoint
from tandem.v1 import decode_pb2, decode_pb2_grpc, gateway_pb2
from telemetry import spans
from telemetry.metrics import GatewayMetrics
from telemetry.tracing import span

_LOG = logging.getLogger(__name__)
_DECODE_METHOD = "tandem.v1.DecodeService/Generate"
_CHARS_PER_TOKEN = 20
"""Decoding one token, of a resume or of a prompt to be echoed, takes as long as encoding about this many characters."""

DecodeCall = grpc.aio.UnaryStreamCall[decode_pb2.DecodeServiceGenerateRequest, decode_pb2.DecodeServiceGenerateResponse]
Write = Callable[[gateway_pb2.GenerateResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Call:
    """What a door knows of the RPC it serves."""

    tenant: str
    remaining_s: float
    """Seconds until the client's deadline, or max_request_time_s."""
    trailers: dict[str, str]
    """Filled with the trailing metadata as it becomes known; the door sends it with whatever status the RPC ends."""
    write: Write
    """Takes one message; does not return before the transport has taken it, which bounds what a slow reader can make the gateway keep."""


@dataclass(slots=True)
class Parts:
    """What all courses share."""

    model: ServedModel
    pools: Pools
    admission: Admission
    limits: RequestLimits
    metrics: GatewayMetrics
    _num_tokenizing: int = 0

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        """A place among those that are tokenized: texts may be long, so their number is bounded like the queue's. Raises StatusError QUEUE_FULL."""
        if self._num_tokenizing >= max(self.admission.limits.max_queue_requests, 1):
            self.metrics.admission_rejections("QUEUE_FULL").inc()
            raise exhausted("QUEUE_FULL", "too many prompts wait to be tokenized", self.admission.retry_after_s())
        self._num_tokenizing += 1
        try:
            yield
        finally:
            self._num_tokenizing -= 1


@dataclass(slots=True)
class _Attempt:
    """One try to have a request served."""

    demand: Demand
    arrival: int
    again: bool = False


class _TryAgain(Exception):
    """Nothing was lost but time: the request goes back to admission."""

    def __init__(self, demand: Demand) -> None:
        super().__init__()
        self.demand = demand


class Course:
    """One request's run."""

    def __init__(self, parts: Parts, request: gateway_pb2.GenerateRequest, call: Call, progress: Progress) -> None:
        self.answer: Answer | None = None
        self._parts = parts
        self._permits = Permits(parts.admission)
        self._request = request
        self._call = call
        self._progress = progress
        self._ends_at = time.monotonic() + call.remaining_s

    async def run(self) -> None:
        request = await self._resolve()
        answer = self.answer = await self._answer(request)
        if answer.finished:
            await self._call.write(answer.ended_message())
            return
        num_replayed = len(request.output_token_ids)
        demand = Demand(len(request.prompt_token_ids) + num_replayed, request.max_tokens - num_replayed, n=request.n)
        attempt = _Attempt(demand, self._parts.admission.next_arrival())
        while True:
            try:
                async with self._admitted(request, attempt) as ticket:
                    route = await self._route(ticket)
                    await self._stream(request, answer, ticket, route)
                    return
            except _TryAgain as again:
                attempt = replace(attempt, demand=again.demand, again=True)

    async def _resolve(self) -> ResolvedRequest:
        parts, request, progress = self._parts, self._request, self._progress
        progress.phase = "tokenize"
        with span(spans.TOKENIZE) as handle, self._parts.tokenizing():
            await failpoint(spans.TOKENIZE)
            prompt = await prompt_token_ids(request, parts.model.tokenizer, max_tokens=parts.pools.max_model_len())
            bad_words = await bad_words_ids(request, parts.model.tokenizer, parts.limits)
            handle.set_attribute(spans.NUM_TOKENS, len(prompt))
        resolved = resolve(
            request,
            prompt,
            bad_words,
            parts.model,
            parts.limits,
            tenant=self._call.tenant,
            request_id=progress.request_id,
            max_model_len=parts.pools.max_model_len(),
        )
        progress.resolved(resolved, parts.model.name, chat=request.WhichOneof("input") == "chat")
        return resolved

    async def _answer(self, resolved: ResolvedRequest) -> Answer:
        """With what a resume has had, and the prompt's text where it is echoed."""
        request, model = self._request, self._parts.model
        num_decoded = len(resolved.output_token_ids) + (len(resolved.prompt_token_ids) if resolved.echo else 0)
        return await model.tokenizer.off_the_loop(
            num_decoded * _CHARS_PER_TOKEN, lambda: Answer(resolved, model, prompt_text=echoed_text(request, resolved, model.tokenizer))
        )

    @asynccontextmanager
    async def _admitted(self, request: ResolvedRequest, attempt: _Attempt) -> AsyncIterator[Ticket]:
        """The permit; the span covers the wait for it alone."""
        progress = self._progress
        progress.phase = "queue"
        async with AsyncExitStack() as held:
            began = time.monotonic()
            with span(spans.QUEUE) as handle:
                await failpoint(spans.QUEUE)
                permit = self._permits.admit(
                    f"{request.tenant}/{request.request_id}",
                    request.tenant,
                    attempt.demand,
                    priority=request.priority,
                    arrival=attempt.arrival,
                    timeout_s=self.remaining_s() - HOP_MARGIN_S,
                    waited_s=progress.queued_s or 0.0,
                    again=attempt.again,
                )
                try:
                    ticket = await held.enter_async_context(permit)
                except Refused as refused:
                    raise self._refusal(refused) from None
                if ticket.waited_for is not None:
                    handle.set_attribute(spans.QUEUE_REASON, ticket.waited_for.value)
                    handle.set_attribute(spans.QUEUE_POSITION, ticket.position)
            progress.queued_s = (progress.queued_s or 0.0) + time.monotonic() - began
            yield ticket

    async def _route(self, ticket: Ticket) -> Route:
        self._progress.phase = "route"
        with span(spans.ROUTE) as handle:
            await failpoint(spans.ROUTE)
            try:
                route = self._parts.admission.confirm(ticket)
            except Refused as refused:
                raise self._elsewhere(ticket) or self._refusal(refused) from None
            handle.set_attribute(spans.DECODE_INSTANCE, route.decode.name)
            if route.prefill is not None:
                handle.set_attribute(spans.PREFILL_INSTANCE, route.prefill.name)
        self._progress.routed(route)
        return route

    async def _stream(self, request: ResolvedRequest, answer: Answer, ticket: Ticket, route: Route) -> None:
        """One call of decode, from its start to its end. Raises StatusError or _TryAgain."""
        message = decode_pb2.DecodeServiceGenerateRequest(
            request_id=request.request_id,
            tenant_salt=request.tenant.encode(),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            sampling_params=request.sampling_params,
            priority=request.priority,
            prefill_instance=route.prefill.name if route.prefill is not None else "",
        )
        try:
            with outgoing(_DECODE_METHOD, attributes={spans.SERVER_ADDRESS: route.decode.name}) as (metadata, _):
                stub = decode_pb2_grpc.DecodeServiceStub(self._parts.pools.decode_channel(route.decode.name))
                call = stub.Generate(message, timeout=next_hop_s(self.remaining_s(), "route"), metadata=metadata)
                try:
                    await self._forward(call, answer, ticket)
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            failure = StatusError.of(error)
            if not answer.finished:
                raise self._after(failure, answer, ticket) from None
            _LOG.warning("decode instance %s failed behind its last token: %s", route.decode.name, failure)
        except BrokenStreamError:
            _LOG.exception("decode instance %s broke its stream", route.decode.name)
            raise internal() from None

    async def _forward(self, call: DecodeCall, answer: Answer, ticket: Ticket) -> None:
        """Decode's messages to the client, each written before the next is read. The last sample's stop string ends the call, decode's own finish is read on
        to the status."""
        admission, progress = self._parts.admission, self._progress
        while (message := await _read(call)) is not None:
            progress.received(message)
            if message.HasField("reservation"):
                admission.answered(ticket, message.reservation.num_charged_blocks)
            else:
                admission.answered(ticket, None)
            if message.HasField("prompt") or message.token_ids:
                admission.prompt_done(ticket)
            response = answer.take(message)
            if response is not None:
                progress.sending(response, answer)
                await self._call.write(response)
            if answer.finished and answer.decode_goes_on:
                return
        if not answer.finished:
            raise BrokenStreamError("it ended without a finish")

    def _after(self, failure: StatusError, answer: Answer, ticket: Ticket) -> Exception:
        """What follows from a failed call."""
        progress, remaining_s = self._progress, self.remaining_s()
        if is_short_of_room(failure) and not answer.began:
            self._permits.refused_by_decode(ticket)
            return _TryAgain(ticket.demand)
        _LOG.warning("decode instance %s failed: %s", ticket.route.decode.name if ticket.route is not None else "", failure)
        if may_go_elsewhere(failure) and progress.num_messages == 0 and remaining_s > 2 * HOP_MARGIN_S:
            elsewhere = self._elsewhere(ticket)
            if elsewhere is not None:
                return elsewhere
        return client_status(failure, remaining_s=remaining_s, phase=progress.phase, num_messages=progress.num_messages)

    def _elsewhere(self, ticket: Ticket) -> _TryAgain | None:
        """One more try, once, when there is another decode instance."""
        if ticket.demand.excluded or ticket.route is None:
            return None
        demand = replace(ticket.demand, excluded=frozenset((ticket.route.decode.name,)))
        return _TryAgain(demand) if self._parts.admission.can_serve(demand) else None

    def _refusal(self, refused: Refused) -> StatusError:
        self._parts.metrics.admission_rejections(refused.reason).inc()
        return refusal_status(refused)

    def remaining_s(self) -> float:
        """Seconds until the request's end is due."""
        return self._ends_at - time.monotonic()


async def _read(call: DecodeCall) -> decode_pb2.DecodeServiceGenerateResponse | None:
    """The next message, None at the end. Raises AioRpcError, also for a status CANCELLED from decode, which grpc.aio shows as a cancel of this task."""
    try:
        message = await call.read()
    except asyncio.CancelledError:
        if _cancelling():
            raise
        raise grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata()) from None
    return None if message is grpc.aio.EOF else cast(decode_pb2.DecodeServiceGenerateResponse, message)


def _cancelling() -> bool:
    # A frame of its own: one that the cancel goes through, and that knows the task, is a cycle which keeps the request until a full collection.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
