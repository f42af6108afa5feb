"""A worker's process as the check sees it: it can be told to fail, and killed, and started again."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from checks.cluster import num_held
from checks.handover_faults_kinds import Kind, Order, Pause
from checks.handover_faults_worker import WorkerSpec, run_worker
from rpc.channels import control_channel
from tandem.v1 import decode_pb2, decode_pb2_grpc, load_pb2, prefill_pb2, prefill_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
_START_S, _STOP_S, _ANSWER_S, _POLL_S = 60.0, 20.0, 30.0, 0.005


def fork_server() -> ForkServerContext:
    """Starts processes in milliseconds, in which torch and the engine are there already."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a fork knows no threads but its caller's
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["checks.handover_faults_preload"])
    return context


class WorkerEndedError(Exception):
    """A worker has ended, or does not answer, and nobody killed it."""


class WorkerProcess:
    """One worker under a name and an address that outlive its process."""

    def __init__(self, context: ForkServerContext, name: str, spec: WorkerSpec, port: int) -> None:
        self.name = name
        self.role = spec.role
        self.address = f"127.0.0.1:{port}"
        self._context = context
        self._spec = spec
        self._process: ForkServerProcess | None = None
        self._commands: Connection | None = None
        self._pauses: Connection | None = None
        self._channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Starts the process, maybe in place of one that was killed. It has to be waited for."""
        await self._let_go()
        self._commands, commands = self._context.Pipe()
        self._pauses, pauses = self._context.Pipe()
        self._process = self._context.Process(target=run_worker, args=(self._spec, commands, pauses), name=self.name, daemon=True)
        self._process.start()
        commands.close()
        pauses.close()

    async def ready(self) -> None:
        """Waits until the service says that it is."""
        async with asyncio.timeout(_START_S):
            await self._listening()
            self._channel = control_channel(self.address)
            while await self.health() != SERVING:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    async def _listening(self) -> None:
        host, port = self.address.split(":")
        while True:
            assert self._process is not None
            if self._process.exitcode is not None:
                raise WorkerEndedError(f"{self.name} ended with {self._process.exitcode}; see {self._spec.log}")
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
                return
            await asyncio.sleep(_POLL_S)

    async def health(self) -> int:
        """Of its service, as a HealthCheckResponse's status."""
        service = f"tandem.v1.{self.role.capitalize()}Service"
        stub: Any = health_pb2_grpc.HealthStub(self.channel)
        status: int = (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_ANSWER_S)).status
        return status

    @property
    def channel(self) -> grpc.aio.Channel:
        """To the process that runs now."""
        assert self._channel is not None
        return self._channel

    async def memory(self) -> load_pb2.MemoryReport:
        """Who holds what."""
        report: load_pb2.MemoryReport
        if self.role == "prefill":
            prefill = prefill_pb2_grpc.PrefillServiceStub(self.channel)
            report = (await prefill.GetMemoryReport(prefill_pb2.PrefillServiceGetMemoryReportRequest(), timeout=_ANSWER_S)).memory
        else:
            decode = decode_pb2_grpc.DecodeServiceStub(self.channel)
            report = (await decode.GetMemoryReport(decode_pb2.DecodeServiceGetMemoryReportRequest(), timeout=_ANSWER_S)).memory
        return report

    async def num_held(self) -> int:
        """Everything that somebody still has there."""
        return num_held(await self.memory())

    async def order(self, order: Order) -> None:
        """The next hand-over that can have it fails so."""
        await self.do("order", order)

    async def injected(self) -> Mapping[Kind, int]:
        """What has been injected there since the process started."""
        found: Mapping[Kind, int] = await self.do("injected")
        return found

    async def failures(self) -> Mapping[str, float]:
        """Failed hand-overs by reason since the process started, as its metrics say."""
        found: Mapping[str, float] = await self.do("failures")
        return found

    async def do(self, name: str, *arguments: object) -> Any:
        """Has something done there and returns the answer. Raises what it raised."""
        assert self._commands is not None
        return await asyncio.to_thread(_ask, self._commands, name, arguments)

    async def paused(self) -> Pause:
        """Waits until a reader waits there; it does until `go_on`."""
        assert self._pauses is not None
        return await asyncio.to_thread(_receive, self._pauses)

    def go_on(self) -> None:
        """Ends the pause."""
        assert self._pauses is not None
        self._pauses.send(None)

    async def kill(self) -> None:
        """SIGKILL, and waits until it is dead; its channel stays for those who wait for an answer."""
        assert self._process is not None
        self._process.kill()
        await asyncio.to_thread(self._process.join, _STOP_S)
        if self._process.exitcode != -signal.SIGKILL:
            raise WorkerEndedError(f"{self.name} ended with {self._process.exitcode} before it was killed; see {self._spec.log}")

    async def stop(self) -> None:
        """SIGTERM; a process that does not drain in its time is killed and an error."""
        if self._process is None:
            return
        self._process.terminate()
        await asyncio.to_thread(self._process.join, _STOP_S)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
        await self._let_go()
        if code != 0:
            raise WorkerEndedError(f"{self.name} ended with {code}; see {self._spec.log}")

    async def _let_go(self) -> None:
        self._process = None
        for line in (self._commands, self._pauses):
            if line is not None:
                line.close()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


def _ask(line: Connection, name: str, arguments: tuple[object, ...]) -> object:
    try:
        line.send((name, arguments))
    except OSError as error:
        raise WorkerEndedError(f"a worker cannot be asked for {name}: {error}") from error
    answer = _receive(line)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _receive(line: Connection) -> Any:
    try:
        if line.poll(_ANSWER_S):
            return line.recv()
    except (EOFError, OSError) as error:
        raise WorkerEndedError(f"a worker was lost: {type(error).__name__}") from error
    raise WorkerEndedError(f"a worker did not answer in {_ANSWER_S:g} s")
