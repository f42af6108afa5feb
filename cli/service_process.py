"""One service as a child process: its command, its log lines, its readiness and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.channels import control_channel

_MAX_LINE_BYTES = 64 * 1024
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 2.0

LineSink = Callable[[str, str], None]
"""Takes a service's name and one of its log lines."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What to start."""

    name: str
    module: str
    """Started as `python -m MODULE`."""
    grpc_service: str
    """Full name, whose health is the service's readiness."""
    port: int
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Over the environment of this process."""

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"


class ServiceProcess:
    """A running child. It has a session of its own, so that the terminal's Ctrl-C reaches only the parent, which drains in order."""

    def __init__(self, spec: ServiceSpec, process: asyncio.subprocess.Process, sink: LineSink) -> None:
        self.spec = spec
        self._process = process
        self._pump = asyncio.create_task(self._forward_lines(sink))
        self.exited = asyncio.create_task(self._wait())
        """Ends with the exit code; negative: the signal's number. The last log line has been passed on by then."""

    @classmethod
    async def start(cls, spec: ServiceSpec, sink: LineSink) -> ServiceProcess:
        """Starts the process; returns at once."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "cli.child",
            str(os.getpid()),
            spec.module,
            *spec.arguments,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(spec, process, sink)

    @property
    def pid(self) -> int:
        """Of the process, also after its end."""
        return self._process.pid

    async def wait_until_ready(self) -> None:
        """Returns when the service's readiness is SERVING. Has no bound of its own, and does not look at the process."""
        async with control_channel(self.spec.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack the methods
            request = health_pb2.HealthCheckRequest(service=self.spec.grpc_service)
            while True:
                try:
                    response = await stub.Check(request, timeout=_PROBE_TIMEOUT_S)
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.aio.AioRpcError:
                    pass  # not listening yet, or starting: the caller's bound ends the waiting
                await asyncio.sleep(_POLL_S)

    def send(self, signum: signal.Signals) -> None:
        """Sends a signal, unless the process has ended."""
        if self._process.returncode is None:
            self._process.send_signal(signum)

    async def _wait(self) -> int:
        code = await self._process.wait()
        await self._pump
        return code

    async def _forward_lines(self, sink: LineSink) -> None:
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(_MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:  # a line without an end must not grow without bound
                lines, rest = [*lines, rest], b""
            for line in lines:
                sink(self.spec.name, line.decode(errors="replace").rstrip("\r"))
        if rest:
            sink(self.spec.name, rest.decode(errors="replace"))
