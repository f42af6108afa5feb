"""`python -m prefill_svc`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvtransfer.errors import NoTransportError
from kvtransfer.socket_dir import open_socket_dir
from prefill_svc.pool import open_pool
from prefill_svc.servicer import PrefillServicer
from prefill_svc.settings import PrefillSettings
from rpc.errors import StartupError
from rpc.service import Service, run_service
from rpc.settings import flag_of, load_settings
from worker.service import Worker, serve_worker

NAME = "prefill"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker; returns the exit code."""
    settings = load_settings(PrefillSettings, argv, prog=NAME)

    @asynccontextmanager
    async def register(worker: Worker) -> AsyncIterator[None]:
        _check_socket_dir(settings)
        opening = open_pool(
            worker.engine,
            worker.metrics,
            transports=settings.kv_transports.split(","),
            socket_dir=settings.kv_socket_dir,
            nixl=settings.nixl(),
            max_reader_stop_s=settings.max_reader_stop_s,
        )
        async with opening as pool:
            servicer = PrefillServicer(pool, worker.load, max_active_requests=settings.max_active_requests, max_request_time_s=settings.max_request_time_s)
            servicer.add_to(worker.server)
            yield

    async def serve(service: Service) -> None:
        await serve_worker(service, settings, register)

    return run_service(serve, settings, NAME)


def _check_socket_dir(settings: PrefillSettings) -> None:
    """A directory that was asked for by name is not done without in silence. Raises StartupError."""
    if settings.kv_socket_dir is None:
        return
    try:
        open_socket_dir(settings.kv_socket_dir)
    except NoTransportError as error:
        raise StartupError(f"{flag_of('kv_socket_dir')}: {error}") from None


if __name__ == "__main__":
    raise SystemExit(main())
