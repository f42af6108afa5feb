"""`python -m prefill_svc`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prefill_svc.pool import open_pool
from prefill_svc.servicer import PrefillServicer
from prefill_svc.settings import PrefillSettings
from rpc.service import Service, run_service
from rpc.settings import load_settings
from worker.service import Worker, serve_worker

NAME = "prefill"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker; returns the exit code."""
    settings = load_settings(PrefillSettings, argv, prog=NAME)

    @asynccontextmanager
    async def register(worker: Worker) -> AsyncIterator[None]:
        pool = open_pool(worker.engine, worker.metrics, max_reader_stop_s=settings.max_reader_stop_s)
        servicer = PrefillServicer(pool, worker.load, max_active_requests=settings.max_active_requests, max_request_time_s=settings.max_request_time_s)
        servicer.add_to(worker.server)
        try:
            yield
        finally:
            pool.close()

    async def serve(service: Service) -> None:
        await serve_worker(service, settings, register)

    return run_service(serve, settings, NAME)


if __name__ == "__main__":
    raise SystemExit(main())
