"""All requests in flight, the same for every door: each runs its course once and is counted once, on every way out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from gateway.course import Call, Course, Parts
from gateway.progress import Progress
from gateway.validation import check_request
from rpc.deadline import HOP_MARGIN_S
from rpc.errors import StatusError, already_exists, deadline_exceeded
from rpc.logs import request_id as logged_request_id
from tandem.v1 import gateway_pb2


class Generations:
    """On the event loop only."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._in_flight: set[tuple[str, str]] = set()
        parts.metrics.num_requests_running.set_function(lambda: parts.admission.num_active)
        parts.metrics.num_requests_waiting.set_function(lambda: parts.admission.num_waiting)

    async def run(self, request: gateway_pb2.GenerateRequest, call: Call) -> None:
        """Serves a request to its end. Raises StatusError; a cancel ends everything below it."""
        progress = Progress(self._parts.metrics, call.trailers)
        course = Course(self._parts, request, call, progress)
        code = grpc.StatusCode.INTERNAL
        try:
            async with asyncio.timeout(call.remaining_s):
                with self._registered(request, call.tenant, progress):
                    await course.run()
            code = grpc.StatusCode.OK
        except StatusError as error:
            code = error.code
            error.trailers.clear()  # a worker's; the client gets this request's own
            raise
        except TimeoutError:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise deadline_exceeded(progress.phase) from None
        except (asyncio.CancelledError, grpc.aio.InternalError):
            # The client has left: told as a cancel, or by a message that could not be sent to it. Its deadline's end comes as a cancel too.
            code = grpc.StatusCode.DEADLINE_EXCEEDED if course.remaining_s() <= HOP_MARGIN_S else grpc.StatusCode.CANCELLED
            raise
        finally:
            progress.ended(code, course.answer)

    def assert_nothing_held(self) -> None:
        """Raises AssertionError that names what is left."""
        assert not self._in_flight, f"in flight: {sorted(self._in_flight)}"
        self._parts.admission.assert_nothing_held()

    @contextmanager
    def _registered(self, request: gateway_pb2.GenerateRequest, tenant: str, progress: Progress) -> Iterator[None]:
        check_request(request, self._parts.model, self._parts.limits)
        request_id = request.request_id or secrets.token_hex(16)
        key = (tenant, request_id)
        if key in self._in_flight:
            raise already_exists(f"request {request_id} is in flight")
        self._in_flight.add(key)
        token = logged_request_id.set(request_id)
        try:
            progress.began(request_id)
            yield
        finally:
            logged_request_id.reset(token)
            self._in_flight.discard(key)
