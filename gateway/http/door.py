"""The HTTP door put together from its parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry
from starlette.routing import Route

from gateway.gateway import Gateway
from gateway.http.app import HttpApp
from gateway.http.body_reader import BodyLimits, BodyReader
from gateway.http.chat_request import chat_request
from gateway.http.completion_request import completion_request
from gateway.http.connection import ConnectionLimits
from gateway.http.exchange import Exchange
from gateway.http.generating import GenerateRoute, Generating
from gateway.http.pages import Page, Pages, TokenizerPages
from gateway.http.running import RunningRequests
from gateway.http.server import HttpServer
from telemetry.metrics import HttpMetrics

_COMPLETIONS: Final = "/v1/completions"
_CHAT_COMPLETIONS: Final = "/v1/chat/completions"


def http_door(
    gateway: Gateway,
    *,
    host: str,
    port: int,
    bodies: BodyReader | None = None,
    connections: ConnectionLimits | None = None,
    registry: CollectorRegistry = REGISTRY,
) -> HttpServer:
    """A server on the gateway's own course; give it to `Gateway.add_door`. Call it on the event loop."""
    running = RunningRequests()
    reader = bodies or BodyReader(BodyLimits())
    model, limits = gateway.model, gateway.request_limits
    generating = Generating(model, gateway.generations, limits, reader, running, gateway.max_request_time_s)
    pages = Pages(model, gateway.pools, registry, lambda: gateway.ready and not running.draining)
    tokenizer = TokenizerPages(model, gateway.pools, limits, reader)
    limits_of_connections = connections or ConnectionLimits()

    def page(answer: Callable[[Exchange], Awaitable[None]]) -> Page:
        return Page(answer, limits_of_connections.max_flush_s)

    routes = [
        Route(_COMPLETIONS, GenerateRoute(generating, completion_request), methods=["POST"]),
        Route(_CHAT_COMPLETIONS, GenerateRoute(generating, chat_request), methods=["POST"]),
        Route("/v1/models", page(pages.models), methods=["GET"]),
        Route("/health", page(pages.health), methods=["GET"]),
        Route("/metrics", page(pages.metrics), methods=["GET"]),
        Route("/version", page(pages.version), methods=["GET"]),
        Route("/tokenize", page(tokenizer.tokenize), methods=["POST"]),
        Route("/detokenize", page(tokenizer.detokenize), methods=["POST"]),
    ]
    app = HttpApp(routes, frozenset({_COMPLETIONS, _CHAT_COMPLETIONS}), HttpMetrics(registry))
    return HttpServer(app, running, host=host, port=port, limits=limits_of_connections)
