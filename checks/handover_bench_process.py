"""A service as a child process of a benchmark: started, ready, and drained at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from cli.service_process import ServiceProcess, ServiceSpec
from kvtransfer.nixl_settings import NixlSettings

_READY_S, _STOP_S = 60.0, 20.0


NIXL_OVER_TCP = NixlSettings("lo", "tcp", "write")
"""Between two processes of one host."""


def nixl_for(transport: str) -> NixlSettings:
    """NIXL is left out unless it is what is measured."""
    return NIXL_OVER_TCP if transport == "nixl" else NixlSettings()


def transport_flags(transport: str, socket_dir: Path) -> tuple[str, ...]:
    """What both workers of a pair are told of transports."""
    nixl = nixl_for(transport)
    return f"--kv-socket-dir={socket_dir}", f"--nixl-net-devices={nixl.net_devices}", f"--nixl-tls={nixl.tls}", f"--nixl-direction={nixl.direction}"


@asynccontextmanager
async def running_service(spec: ServiceSpec, log: Path) -> AsyncIterator[ServiceProcess]:
    """Starts it and waits until it is ready; its lines are added to `log`. Raises RuntimeError when it ends first."""
    with log.open("a") as file:
        process = await ServiceProcess.start(spec, lambda name, line: print(f"{name:<8}| {line}", file=file, flush=True))
        try:
            ready = asyncio.ensure_future(process.wait_until_ready())
            await asyncio.wait({ready, process.exited}, timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                ready.cancel()
                raise RuntimeError(f"{spec.name} did not get ready; see {log}")
            yield process
        finally:
            process.send(signal.SIGTERM)
            try:
                await asyncio.wait_for(asyncio.shield(process.exited), _STOP_S)
            except TimeoutError:
                process.send(signal.SIGKILL)
                await process.exited


def pin_process(pid: int, to: Iterable[int]) -> None:
    """Confines all threads that a process has now, and those that they start, to these cores."""
    wanted = set(to)
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), wanted)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
