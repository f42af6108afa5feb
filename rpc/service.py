"""Runs a service's coroutine as a process: event loop, signals, logs, tracing, metrics endpoint, exit code.

async def serve(service: Service) -> None:
    server = RpcServer("decode", host=settings.host, port=settings.port)
    ...
    await server.start()
    server.set_ready(True)
    service.started()
    await service.wait_for_stop()
    await server.drain(settings.drain_grace_s)

raise SystemExit(run_service(serve, settings, "decode"))
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import Any, Final

import uvloop
from prometheus_client import REGISTRY, start_http_server

from rpc import failpoints
from rpc.errors import StartupError
from rpc.logs import configure_logging
from rpc.process import freeze_heap, keep_freed_memory
from rpc.settings import USAGE_EXIT_CODE, ServiceSettings
from telemetry import tracing

_LOG = logging.getLogger(__name__)


class ExitCode(IntEnum):
    """How the process ended; a second signal ends it with 128 + the signal's number."""

    DRAINED = 0
    FAILED = 1
    CANNOT_START = USAGE_EXIT_CODE


class Service:
    """The running service as its coroutine sees it. Lives on the event loop."""

    def __init__(self, name: str, settings: ServiceSettings) -> None:
        self.name = name
        self.settings = settings
        self.failure: BaseException | None = None
        self._stop = asyncio.Event()

    def started(self) -> None:
        """Call once everything is loaded: freezes the heap."""
        freeze_heap()

    def stop(self) -> None:
        """Asks the service to drain and end; the process exits with 0."""
        self._stop.set()

    def fail(self, failure: BaseException) -> None:
        """Asks the service to end since something it cannot work without is dead; the process exits with 1."""
        if self.failure is None:
            self.failure = failure
            _LOG.critical("%s has failed: %s", self.name, failure, exc_info=failure)
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """A signal came, or `stop` or `fail` was called."""
        return self._stop.is_set()

    async def wait_for_stop(self) -> None:
        """Returns when the service is to end."""
        await self._stop.wait()


Serve = Callable[[Service], Coroutine[Any, Any, None]]


def run_service(serve: Serve, settings: ServiceSettings, name: str) -> ExitCode:
    """Runs `serve(service)` until it returns; SIGTERM and SIGINT end `wait_for_stop`, a second one ends the process at once.

    Exit codes: DRAINED, FAILED after an exception or `fail`, CANNOT_START after StartupError, which is told in one line. Call it from the main thread.
    """
    configure_logging(name, log_format=settings.log_format, log_level=settings.log_level)
    keep_freed_memory()
    try:
        _configure_failpoints()
        _configure_tracing(name, settings)
        with _metrics_endpoint(settings):
            return uvloop.run(_run(serve, settings, name))
    except StartupError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return ExitCode.CANNOT_START


async def _run(serve: Serve, settings: ServiceSettings, name: str) -> ExitCode:
    service = Service(name, settings)
    _handle_signals(service)
    try:
        await serve(service)
    except StartupError:
        raise
    except Exception:
        _LOG.critical("%s ends with an error", name, exc_info=True)
        return ExitCode.FAILED
    finally:
        if not await tracing.shutdown():
            _LOG.warning("spans were lost: the collector did not take them in time")
    _LOG.info("%s has ended", name)
    return ExitCode.FAILED if service.failure else ExitCode.DRAINED


def _handle_signals(service: Service) -> None:
    """The first signal drains; a second one ends the process, also when the loop is blocked, so Python's own handlers are used and not the loop's."""
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def drain(number: int) -> None:
        name = signal.Signals(number).name
        _LOG.info("%s received %s and drains for at most %g s", service.name, name, service.settings.drain_grace_s)
        service.stop()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            os.write(sys.stderr.fileno(), f"{service.name}: second signal, ending at once\n".encode())
            os._exit(128 + number)
        loop.call_soon_threadsafe(drain, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def _configure_failpoints() -> None:
    try:
        failpoints.configure_failpoints(os.environ.get(failpoints.ENVIRONMENT_VARIABLE, ""))
    except ValueError as error:
        raise StartupError(f"{failpoints.ENVIRONMENT_VARIABLE}: {error}") from None
    if failpoints.active_failpoints():
        _LOG.warning("FAILPOINTS ARE SET, this service is slow on purpose: %s", failpoints.active_failpoints())


def _configure_tracing(name: str, settings: ServiceSettings) -> None:
    try:
        tracing.configure_tracing(name, settings.instance or name)
    except ValueError as error:
        raise StartupError(str(error)) from None


@contextmanager
def _metrics_endpoint(settings: ServiceSettings) -> Iterator[None]:
    if settings.metrics_port < 0:
        yield
        return
    try:
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host, REGISTRY)
    except OSError as error:
        raise StartupError(f"--metrics-port: cannot listen on {settings.metrics_host}:{settings.metrics_port}: {error.strerror or error}") from None
    _LOG.info("metrics at http://%s:%d/metrics", settings.metrics_host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_METRICS_STOP_S)


_METRICS_STOP_S: Final = 2.0
