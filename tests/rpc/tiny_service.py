"""A service for the process tests: one RPC that waits until it is told to answer. `tiny_service.py MODE [flags]`."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import Any

import grpc

from rpc.server import RpcServer
from rpc.service import Service, run_service
from rpc.settings import ServiceSettings, load_settings


def _block() -> None:
    """Keeps the event loop from running, as a model that is loaded on it would."""
    print("blocked", flush=True)
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        time.sleep(0.05)


async def serve(service: Service) -> None:
    mode = sys.argv[1]

    async def wait(request: bytes, _context: Any) -> bytes:
        print("waiting", flush=True)
        await asyncio.sleep(float(request.decode()))
        return request

    server = RpcServer(service.name, host=service.settings.host, port=service.settings.port)
    server.add_generic([grpc.method_handlers_generic_handler("tandem.test.Tiny", {"Wait": grpc.unary_unary_rpc_method_handler(wait)})])
    port = await server.start()
    server.set_ready(True)
    service.started()
    print(port, type(asyncio.get_running_loop()).__module__, flush=True)
    if mode == "raise":
        raise RuntimeError("broken on purpose")
    if mode == "fail":
        service.fail(RuntimeError("the engine is dead"))
    if mode == "block":
        _block()
    logging.getLogger("tiny").info("serving")
    await service.wait_for_stop()
    await server.drain(service.settings.drain_grace_s)


raise SystemExit(run_service(serve, load_settings(ServiceSettings, sys.argv[2:], prog="tiny"), "tiny"))
