"""The real services as processes, with what a test of faults needs: log lines, clients of all, signals, restarts, and the oracle of what is held."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cli.service_process import ServiceProcess
from cli.stack import Stack, StackOptions
from rpc.channels import control_channel
from tandem.v1 import decode_pb2, decode_pb2_grpc, gateway_pb2, gateway_pb2_grpc, load_pb2, prefill_pb2, prefill_pb2_grpc
from tests.support.live_request import LiveRequest, request_of

READY_S = 60.0
_CALL_S, _DRAIN_S = 10.0, 20.0
WORKER_ARGS = "--dtype=float32 --num-threads=1 --metrics-port=-1 --num-blocks=512 --max-num-seqs=8 --max-prefill-tokens-per-step=16"
"""A small pool (8192 tokens) and prompts in many chunks."""
GATEWAY_ARGS = "--metrics-port=-1"


def options_of(
    model: Path,
    *,
    prefill: str = "",
    decode: str = "",
    gateway: str = "",
    num_prefill: int = 1,
    num_decode: int = 1,
    http_port: int = -1,
    environment: dict[str, str] | None = None,
) -> StackOptions:
    """A stack's options; `prefill`, `decode` and `gateway` are further flags."""
    return StackOptions(
        model,
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill_args=f"{WORKER_ARGS} {prefill}",
        decode_args=f"{WORKER_ARGS} {decode}",
        gateway_args=f"{GATEWAY_ARGS} {gateway}",
        environment=environment or {},
        http_port=http_port,
    )


class LiveStack:
    """A running Stack. Services are named gateway, prefill-0, decode-0 and so on."""

    def __init__(self, options: StackOptions) -> None:
        self.lines: dict[str, list[str]] = defaultdict(list)
        """Log lines by service, of all its starts."""
        self.stack = Stack(options, self._take_line)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._requests: list[LiveRequest] = []
        self._children: dict[str, ServiceProcess] = self.stack._children  # a Stack itself never restarts a service: its users want to hear of an end

    def _take_line(self, name: str, line: str) -> None:
        self.lines[name].append(line)
        print(f"{name:<10}| {line}")  # shown by pytest when a test fails

    async def open(self, channels: AsyncExitStack) -> None:
        """Starts all services and waits until they are ready; channels are closed with `channels`."""
        self._open = channels
        await self.stack.start()
        await self.stack.wait_until_ready(READY_S)
        for name, address in self.stack.addresses.items():
            self._channels[name] = await channels.enter_async_context(control_channel(address))

    @property
    def gateway(self) -> gateway_pb2_grpc.GatewayServiceStub:
        """Where clients ask."""
        return gateway_pb2_grpc.GatewayServiceStub(self._channels["gateway"])

    async def second_gateway(self) -> gateway_pb2_grpc.GatewayServiceStub:
        """Starts gateway-1 in front of the same pools; returns when it is ready."""
        first = self._children["gateway"].spec
        arguments = tuple("--port=0" if argument.startswith("--port=") else argument for argument in first.arguments)
        child = self._children["gateway-1"] = await ServiceProcess.start(replace(first, name="gateway-1", arguments=arguments), self._take_line)

        async def listens() -> bool:
            return any("listens on" in line for line in self.lines["gateway-1"])

        await until(listens, READY_S, "gateway-1 does not listen")
        port = int(next(line for line in self.lines["gateway-1"] if "listens on" in line).rpartition(":")[2])
        child.spec = replace(child.spec, port=port)
        await asyncio.wait_for(child.wait_until_ready(), READY_S)
        self._channels["gateway-1"] = await self._open.enter_async_context(control_channel(child.spec.address))
        return gateway_pb2_grpc.GatewayServiceStub(self._channels["gateway-1"])

    @property
    def workers(self) -> list[str]:
        """Names of all workers whose process lives."""
        return [name for name, child in self._children.items() if not name.startswith("gateway") and not child.exited.done()]

    def ask(self, prompt: Iterable[int], at: gateway_pb2_grpc.GatewayServiceStub | None = None, /, *, timeout_s: float = 30.0, **params: Any) -> LiveRequest:
        """Sends a request in tokens, to the first gateway if no other is given; `params` as of `request_of`."""
        request = LiveRequest(at or self.gateway, request_of(prompt, **params), timeout_s)
        self._requests.append(request)
        return request

    async def clear(self) -> None:
        """Leaves every request that has not ended, and ends a second gateway."""
        for request in self._requests:
            if request.code is None:
                request.cancel()
        self._requests.clear()
        if "gateway-1" in self._children:
            await self.kill("gateway-1")
            del self._children["gateway-1"]

    # What the services say

    async def memory(self, name: str) -> load_pb2.MemoryReport:
        """Who holds what in a worker."""
        if name.startswith("decode"):
            decode = decode_pb2_grpc.DecodeServiceStub(self._channels[name])
            of_decode: decode_pb2.DecodeServiceGetMemoryReportResponse = await decode.GetMemoryReport(
                decode_pb2.DecodeServiceGetMemoryReportRequest(), timeout=_CALL_S
            )
            return of_decode.memory
        prefill = prefill_pb2_grpc.PrefillServiceStub(self._channels[name])
        of_prefill: prefill_pb2.PrefillServiceGetMemoryReportResponse = await prefill.GetMemoryReport(
            prefill_pb2.PrefillServiceGetMemoryReportRequest(), timeout=_CALL_S
        )
        return of_prefill.memory

    async def status(self) -> gateway_pb2.GetStatusResponse:
        """The gateway's view."""
        status: gateway_pb2.GetStatusResponse = await self.gateway.GetStatus(gateway_pb2.GetStatusRequest(), timeout=_CALL_S)
        return status

    async def is_ready(self, name: str = "gateway") -> bool:
        """A service's readiness by grpc.health.v1."""
        stub: Any = health_pb2_grpc.HealthStub(self._channels[name])
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=self._children[name].spec.grpc_service), timeout=_CALL_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_until_available(self, *names: str, within_s: float = 10.0) -> None:
        """Waits until the gateway would send requests to all of these workers."""

        async def available() -> bool:
            known = {instance.name for instance in (await self.status()).instances if instance.available}
            return set(names) <= known

        await until(available, within_s, f"{names} are not available")

    async def assert_nothing_held(self, within_s: float = 5.0, *, workers: Iterable[str] = (), without_gateway: bool = False) -> None:
        """Waits until no living worker holds a block, a sequence, a hold or a reader, no handler runs, and the gateway has nobody running or waiting.

        `workers`: only these are asked.
        """
        held: dict[str, str] = {}

        async def nothing() -> bool:
            held.clear()
            for name in workers or self.workers:
                if text := _held(await self.memory(name)):
                    held[name] = text
            if not without_gateway:
                status = await self.status()
                if status.num_requests_running or status.num_requests_waiting:
                    held["gateway"] = f"running={status.num_requests_running} waiting={status.num_requests_waiting}"
            return not held

        await until(nothing, within_s, f"still held after {within_s:g} s: ", lambda: str(held))

    def assert_clean_logs(self, *, expected: Iterable[str] = ()) -> None:
        """No service wrote a traceback or lost an exception; a line with one of `expected` in it accounts for the tracebacks of its service."""
        bad = {
            name: [line for line in lines if any(sign in line for sign in ("Traceback", "never retrieved", "Exception in callback", "Fatal Python"))]
            for name, lines in self.lines.items()
            if not any(text in line for text in expected for line in lines)
        }
        assert not any(bad.values()), {name: "\n".join(self.lines[name][-60:]) for name, lines in bad.items() if lines}

    # What is done to the services

    def send(self, name: str, signum: signal.Signals) -> None:
        """Sends a signal to a service."""
        self._children[name].send(signum)

    async def exit_code(self, name: str, within_s: float) -> int:
        """Waits for a service's end; negative: the signal's number."""
        return await asyncio.wait_for(asyncio.shield(self._children[name].exited), within_s)

    async def kill(self, name: str) -> None:
        """SIGKILL; returns when the process is gone."""
        self.send(name, signal.SIGKILL)
        assert await self.exit_code(name, 10.0) == -signal.SIGKILL

    async def ensure(self, name: str, failpoints: str | None = None) -> None:
        """Has a service run, with these failpoints when they are given: starts one that has ended again, on the same port.

        Returns when the gateway would send requests to all living workers.
        """
        child = self._children[name]
        child.send(signal.SIGCONT)
        environment = child.spec.environment if failpoints is None else {**child.spec.environment, "TANDEM_FAILPOINTS": failpoints}
        if not child.exited.done():
            if environment == child.spec.environment:
                return
            await self.kill(name)
        child = self._children[name] = await ServiceProcess.start(replace(child.spec, environment=environment), self._take_line)
        await asyncio.wait_for(child.wait_until_ready(), READY_S)
        await self.wait_until_available(*self.workers)

    async def close(self) -> None:
        """Drains everything; kills what a failed test left frozen."""
        for child in self._children.values():
            child.send(signal.SIGCONT)
        await self.clear()  # the Stack does not know a second gateway
        await self.stack.drain(_DRAIN_S)


def _held(report: load_pb2.MemoryReport) -> str:
    """Everything that somebody still has, as text; empty for nothing."""
    anything = report.num_held_blocks or sum(report.sequences_by_state.values()) or report.num_holds or report.num_readers or report.num_active_rpcs
    if not anything:
        return ""
    owners = {owner.name: owner.num_blocks for owner in report.owners}
    counts = f"holds={report.num_holds} readers={report.num_readers} rpcs={report.num_active_rpcs}"
    return f"owners={owners} sequences={dict(report.sequences_by_state)} {counts}"


@asynccontextmanager
async def live_stack(options: StackOptions) -> AsyncIterator[LiveStack]:
    """A running stack that is drained at the end."""
    async with AsyncExitStack() as channels:
        stack = LiveStack(options)
        try:
            await stack.open(channels)
            yield stack
        finally:
            await stack.close()


async def until(condition: Callable[[], Awaitable[bool]], within_s: float, otherwise: str, more: Callable[[], str] = str) -> None:
    """Asks every 20 ms until the condition holds."""
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, otherwise + more()
        await asyncio.sleep(0.02)
