"""The two routes that generate: body to requests, requests through the gateway's one course, messages to an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.types import Receive, Scope, Send

from gateway.course import Call
from gateway.generation import Generations
from gateway.http.asked import Asked
from gateway.http.body_reader import BodyReader, check_content_type
from gateway.http.errors import CLIENT_CLOSED, HttpError, payload
from gateway.http.exchange import Exchange, events, exchange_of
from gateway.http.running import RunningRequests, shutting_down
from gateway.http.side_by_side import side_by_side
from gateway.limits import RequestLimits
from gateway.served_model import ServedModel
from rpc.errors import StatusError, deadline_exceeded
from tandem.v1 import gateway_pb2
from telemetry import spans
from telemetry.tracing import span

_TENANT: Final = "default"
"""The tenant of requests without a credential, as at the gRPC door."""
_MAX_PROMPTS_AT_ONCE: Final = 16
_LATE_S: Final = 1.0
"""How long after the request's deadline, whose phase the course tells, even a reader that takes nothing is given up."""


class ReadRequest(Protocol):
    """Makes requests of a body. Raises StatusError that names the field."""

    def __call__(self, raw: bytes, model: ServedModel, limits: RequestLimits, *, request_id: str) -> Asked: ...


@dataclass(frozen=True, slots=True)
class Generating:
    """What both routes share."""

    model: ServedModel
    generations: Generations
    limits: RequestLimits
    bodies: BodyReader
    running: RunningRequests
    max_request_time_s: float


class GenerateRoute:
    """An ASGI application for one path. Raises StatusError and HttpError."""

    def __init__(self, parts: Generating, read_request: ReadRequest) -> None:
        self._parts = parts
        self._read_request = read_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request to its end, or until its client leaves or a drain's grace is over."""
        exchange = exchange_of(scope)
        with self._parts.running.running():
            turn = _Turn(self._parts, self._read_request, exchange)
            work = asyncio.create_task(turn.run())
            gone = asyncio.create_task(_gone(exchange, turn.body_taken))
            try:
                done, _ = await asyncio.wait((work, gone, self._parts.running.ended), return_when=asyncio.FIRST_COMPLETED)
                if work not in done:
                    raise HttpError(CLIENT_CLOSED, "the client left") if gone in done else shutting_down()
            finally:
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
            work.result()


async def _gone(exchange: Exchange, body_taken: asyncio.Event) -> None:
    """Returns when the client has left; until the body is there, its reader is the one to see that."""
    await body_taken.wait()
    while (await exchange.receive())["type"] != "http.disconnect":
        pass


class _Turn:
    """One request's work, which may be cancelled at any point."""

    def __init__(self, parts: Generating, read_request: ReadRequest, exchange: Exchange) -> None:
        self.body_taken = asyncio.Event()
        self._parts = parts
        self._read_request = read_request
        self._exchange = exchange
        self._ends_at = time.monotonic() + parts.max_request_time_s
        self._trailers: dict[str, str] = {}
        """Of the gRPC door; told as headers where there is one prompt."""
        self._num_bytes = 0
        """Of messages that were taken and have not gone out."""
        self._making = asyncio.Lock()

    async def run(self) -> None:
        """Raises StatusError and HttpError."""
        try:
            async with asyncio.timeout(self._parts.max_request_time_s + _LATE_S):
                await self._answer(await self._asked())
        except TimeoutError:
            raise self._told(deadline_exceeded("send")) from None
        except StatusError as error:
            raise self._told(error) from None

    def _told(self, error: StatusError) -> HttpError:
        told = HttpError.of(error)
        told.headers += self._trailers.items()
        return told

    async def _asked(self) -> Asked:
        parts, exchange = self._parts, self._exchange
        check_content_type(exchange.headers)
        with parts.bodies.holding() as body:
            await parts.bodies.read(exchange.headers, exchange.receive, body)
            self.body_taken.set()
            raw = bytes(body.content)
            return await parts.model.tokenizer.off_the_loop(
                len(raw), lambda: self._read_request(raw, parts.model, parts.limits, request_id=exchange.request_id)
            )

    async def _answer(self, asked: Asked) -> None:
        await side_by_side([self._work(asked, prompt) for prompt in range(len(asked.requests))], _MAX_PROMPTS_AT_ONCE)
        exchange = self._exchange
        if asked.stream:
            await exchange.events(events(asked.answer.last()), self._trailers)
            await exchange.done()
            return
        # As long as the messages were: log probabilities of thousands of tokens take a good part of a second.
        body = await self._parts.model.tokenizer.off_the_loop(self._num_bytes, lambda: payload(asked.answer.whole()))
        await exchange.whole(body, "application/json", headers=self._trailers.items())

    def _work(self, asked: Asked, prompt: int) -> Callable[[], Awaitable[None]]:
        request = asked.requests[prompt]
        alone = len(asked.requests) == 1
        trailers = self._trailers if alone else {}

        async def write(response: gateway_pb2.GenerateResponse) -> None:
            self._num_bytes += response.ByteSize()
            async with self._making:  # one at a time, as an answer is not for two threads
                # A first chunk has all log probabilities of its prompt, which take as long as they are many.
                num_bytes = self._num_bytes if asked.stream else 0
                body = await self._parts.model.tokenizer.off_the_loop(num_bytes, lambda: events(asked.answer.take(prompt, response)))
                self._num_bytes = 0 if body else self._num_bytes
            await self._exchange.events(body, trailers)

        async def run() -> None:
            call = Call(_TENANT, self._ends_at - time.monotonic(), trailers, write)
            if alone:
                await self._parts.generations.run(request, call)
                return
            with span(spans.PROMPT, attributes={spans.PROMPT_INDEX: prompt}):
                await self._parts.generations.run(request, call)

        return run
