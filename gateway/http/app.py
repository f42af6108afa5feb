"""The HTTP door's routes, and around each of them: the error's status, the span, the count."""

from __future__ import annotations

import logging
import time
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry.trace import SpanKind
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from gateway.http.errors import CLIENT_CLOSED, HttpError, let_go
from gateway.http.exchange import Exchange, open_exchange
from rpc.errors import StatusError
from telemetry import spans
from telemetry.metrics import HttpMetrics
from telemetry.tracing import extract, span

_LOG = logging.getLogger(__name__)
_OTHER: Final = "other"
_MAX_SHOWN_CHARS: Final = 128


class HttpApp:
    """An ASGI application. Those of `traced` get a span each: pages that are asked for all the time would fill every trace store."""

    def __init__(self, routes: list[Route], traced: frozenset[str], metrics: HttpMetrics) -> None:
        self._router = Router(routes, redirect_slashes=False)
        self._paths = frozenset(route.path for route in routes)
        self._traced = traced
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one HTTP request; whatever happens, it is answered and counted."""
        assert scope["type"] == "http"  # no web sockets and no lifespan: the server is told so
        scope["app"] = self  # has the router raise what it would otherwise answer in plain text
        exchange = open_exchange(scope, receive, send)
        route = scope["path"] if scope["path"] in self._paths else _OTHER
        started_s = time.monotonic()
        self._metrics.started(route)
        try:
            if route in self._traced and scope["method"] == "POST":
                await self._traced_run(exchange, route)
            else:
                await self._run(exchange)
        finally:
            self._metrics.ended(route, exchange.code or 500, time.monotonic() - started_s)

    async def _traced_run(self, exchange: Exchange, route: str) -> None:
        scope = exchange.scope
        parent = extract(exchange.headers.items()) or otel_context.Context()
        attributes = {
            spans.HTTP_REQUEST_METHOD: scope["method"],
            spans.HTTP_ROUTE: route,
            spans.URL_PATH: route,
            spans.URL_SCHEME: scope["scheme"],
            spans.REQUEST_ID: exchange.request_id,
        }
        with span(f"{scope['method']} {route}", kind=SpanKind.SERVER, attributes=attributes, parent=parent, set_error=False) as handle:
            try:
                await self._run(exchange)
            finally:
                handle.set_attribute(spans.HTTP_RESPONSE_STATUS_CODE, exchange.code)
                if exchange.code == CLIENT_CLOSED:
                    handle.set_attribute(spans.CANCELLED, True)
                if exchange.code >= 500:
                    handle.fail(str(exchange.code))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._router(exchange.scope, exchange.receive, exchange.send)
            return
        except Exception as error:
            failure = _failure_of(exchange, error)
            let_go(error)
        await exchange.fail(failure)


def _failure_of(exchange: Exchange, error: Exception) -> HttpError:
    if isinstance(error, HttpError):
        return error
    if isinstance(error, StatusError):
        return HttpError.of(error)
    if isinstance(error, HTTPException):
        return _not_served(exchange, error)
    _LOG.error("%s %s failed", exchange.scope["method"], exchange.scope["path"][:_MAX_SHOWN_CHARS], exc_info=error)
    return HttpError(500, "internal error")


def _not_served(exchange: Exchange, error: HTTPException) -> HttpError:
    scope = exchange.scope
    place = f"{scope['method'][:_MAX_SHOWN_CHARS]} {scope['path'][:_MAX_SHOWN_CHARS]}"
    allow = (error.headers or {}).get("Allow", "")
    if not allow:
        return HttpError(error.status_code, f"{place} is not served")
    methods = ", ".join(sorted(allow.split(", ")))
    return HttpError(error.status_code, f"{place} is not served; {methods} is", headers=[("allow", methods)])
