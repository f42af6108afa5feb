"""`python -m decode_svc`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from decode_svc.kv_path_events import kv_path_events
from decode_svc.peers import KvParts, PrefillPeers, parse_targets
from decode_svc.pool import DecodePool, PrefillPace
from decode_svc.servicer import DecodeServicer
from decode_svc.settings import DecodeSettings
from kvtransfer.block_copy import load_copy
from kvtransfer.errors import NoTransportError
from kvtransfer.quarantine import Quarantine
from kvtransfer.socket_dir import open_socket_dir
from rpc.errors import StartupError
from rpc.service import Service, run_service
from rpc.settings import load_settings
from worker.service import Worker, serve_worker

NAME = "decode"
_LOG = logging.getLogger(__name__)


@asynccontextmanager
async def register(worker: Worker, settings: DecodeSettings) -> AsyncIterator[None]:
    """Adds DecodeService and opens the channels to its prefill instances."""
    alarms = worker.metrics.num_quarantined_readers
    quarantine = Quarantine(max_stop_s=settings.max_reader_stop_s, on_alarm=lambda _: alarms.inc(), on_end=alarms.dec)
    # Here and not while a pairing waits for it: compiling takes seconds, and where and by what the worker's settings say.
    await asyncio.to_thread(load_copy, settings.cache_dir, settings.compiler)
    executor = ThreadPoolExecutor(1, thread_name_prefix="kv-copy")
    parts = KvParts.of(worker.engine.kv_cache, executor, replace(settings.kv(), socket_dir=_socket_dir(settings)))
    peers = PrefillPeers(parse_targets(settings.prefill), parts, kv_path_events(worker.metrics, worker.load))
    pool = DecodePool(worker.engine, peers, quarantine, settings.policy(), worker.metrics, PrefillPace(), settings.max_request_time_s)
    DecodeServicer(pool, worker.load, max_active_requests=settings.max_active_requests).add_to(worker.server)
    worker.load.set_kv_paths(peers.kv_paths)
    peers.start()
    try:
        yield
    finally:
        await peers.close()
        executor.shutdown(wait=False, cancel_futures=True)


def _socket_dir(settings: DecodeSettings) -> Path | None:
    """None when there can be none and none was asked for: transports that need it are left out. Raises StartupError."""
    try:
        return open_socket_dir(settings.kv_socket_dir)
    except NoTransportError as error:
        if settings.kv_socket_dir is not None:
            raise StartupError(f"--kv-socket-dir: {error}") from error
        _LOG.warning("KV cannot be read by transports that need a unix socket: %s", error)
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the worker; returns the exit code."""
    settings = load_settings(DecodeSettings, argv, prog=NAME)

    async def serve(service: Service) -> None:
        await serve_worker(service, settings, lambda worker: register(worker, settings))

    return run_service(serve, settings, NAME)


if __name__ == "__main__":
    raise SystemExit(main())
