"""Prefill, decode and gateway as children of this process: started together, watched, drained in order."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from cli.child import SERVICE_MODULES
from cli.errors import UserError
from cli.service_process import LineSink, ServiceProcess, ServiceSpec

_HTTP_PORT = "--http-port="


@dataclass(frozen=True, slots=True)
class StackOptions:
    """Which services to start, and with what."""

    model: Path
    gateway_port: int = 0
    """0: any free one."""
    num_prefill: int = 1
    num_decode: int = 1
    prefill_args: str = ""
    """Further flags, as a shell would split them."""
    decode_args: str = ""
    gateway_args: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    http_port: int = -1
    """Of the gateway's HTTP door; 0: any free one, -1: no such door."""

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise UserError(f"{self.model} is no model directory (it has no config.json); `tandem import` writes one")
        if self.num_decode < 1 or self.num_prefill < 0:
            raise UserError("at least one decode instance is needed, and no fewer than 0 prefill instances")


@dataclass(frozen=True, slots=True)
class Exit:
    """A child that ended."""

    name: str
    code: int

    def __str__(self) -> str:
        how = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with code {self.code}"
        return f"{self.name} {how}"


def _free_ports(wanted: Sequence[int]) -> list[int]:
    """One for each (0: any), all free at this moment."""
    with ExitStack() as sockets:
        ports = []
        for port in wanted:
            probe = sockets.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise UserError(f"port {port} on 127.0.0.1 cannot be used: {error.strerror}") from None
            ports.append(probe.getsockname()[1])
        return ports


def _threads_per_worker(num_workers: int) -> dict[str, str]:
    """The cores divided among the workers, unless somebody has decided: workers that each took all cores would wait for each other in every step."""
    if "TANDEM_NUM_THREADS" in os.environ:
        return {}
    return {"TANDEM_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_workers))}


def _plan(options: StackOptions) -> list[list[ServiceSpec]]:
    """Specs by pool in the order in which they are drained: the gateway first, since its requests need the others to finish."""
    num_workers = options.num_prefill + options.num_decode
    gateway_port, http_port, *ports = _free_ports([options.gateway_port, max(options.http_port, 0)] + [0] * num_workers)
    threads = _threads_per_worker(num_workers)

    def spec(name: str, kind: str, port: int, extra: str, *arguments: str) -> ServiceSpec:
        common = ("--host=127.0.0.1", f"--port={port}", f"--model={options.model}", f"--instance={name}")
        service = f"tandem.v1.{kind.capitalize()}Service"
        return ServiceSpec(name, SERVICE_MODULES[kind], service, port, (*common, *arguments, *shlex.split(extra)), {**threads, **options.environment})

    prefill = [spec(f"prefill-{i}", "prefill", ports.pop(), options.prefill_args) for i in range(options.num_prefill)]
    prefill_list = f"--prefill={','.join(f'{one.name}={one.address}' for one in prefill)}"
    decode = [spec(f"decode-{i}", "decode", ports.pop(), options.decode_args, prefill_list) for i in range(options.num_decode)]
    decode_list = f"--decode={','.join(f'{one.name}={one.address}' for one in decode)}"
    http = () if options.http_port < 0 else (f"{_HTTP_PORT}{http_port}",)
    gateway = spec("gateway", "gateway", gateway_port, options.gateway_args, prefill_list, decode_list, *http)
    return [[gateway], decode, prefill]


async def _all(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks)


class Stack:
    """The services of one `tandem up` or `tandem demo`. Lives on one event loop; whoever starts it drains it."""

    def __init__(self, options: StackOptions, sink: LineSink) -> None:
        self._pools = _plan(options)
        self._sink = sink
        self._children: dict[str, ServiceProcess] = {}

    @property
    def gateway_address(self) -> str:
        """Where clients connect."""
        return self._pools[0][0].address

    @property
    def http_url(self) -> str | None:
        """Where OpenAI clients connect; None without an HTTP door."""
        ports = [argument.removeprefix(_HTTP_PORT) for argument in self._pools[0][0].arguments if argument.startswith(_HTTP_PORT)]
        return f"http://127.0.0.1:{ports[0]}/v1" if ports else None

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each service by its name, gateway first."""
        return {spec.name: spec.address for pool in self._pools for spec in pool}

    @property
    def pids(self) -> dict[str, int]:
        """Process of each started service by its name."""
        return {name: child.pid for name, child in self._children.items()}

    async def start(self) -> None:
        """Starts all processes; readiness is another matter."""
        for pool in reversed(self._pools):
            for spec in pool:
                self._children[spec.name] = await ServiceProcess.start(spec, self._sink)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Raises UserError when a child ends before all are ready, or `timeout_s` passes; both say which."""
        probes = {name: asyncio.create_task(child.wait_until_ready()) for name, child in self._children.items()}
        first_exit = asyncio.create_task(self.wait_for_exit())
        all_ready = asyncio.create_task(_all(probes.values()))
        try:
            await asyncio.wait((all_ready, first_exit), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if first_exit.done():
                raise UserError(f"{first_exit.result()} before it was ready")
            if not all_ready.done():
                raise UserError(f"not ready after {timeout_s:g} s: {', '.join(name for name, probe in probes.items() if not probe.done())}")
            all_ready.result()
        finally:
            for task in (first_exit, all_ready, *probes.values()):
                task.cancel()
            await asyncio.gather(first_exit, all_ready, *probes.values(), return_exceptions=True)

    async def wait_for_exit(self) -> Exit:
        """Waits for the first child that ends."""
        exits = {child.exited: name for name, child in self._children.items()}
        done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
        first = done.pop()
        return Exit(exits[first], first.result())

    async def drain(self, timeout_s: float) -> list[Exit]:
        """SIGTERM to the gateway, then decode, then prefill, each once those before have ended; SIGKILL for what `timeout_s` was too short for.

        Returns the children that ended otherwise than with code 0; a child that had not yet learned to drain may end by the SIGTERM itself.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for pool in self._pools:
                    running = [self._children[spec.name] for spec in pool if spec.name in self._children]
                    for child in running:
                        child.send(signal.SIGTERM)
                    if running:
                        await asyncio.wait([child.exited for child in running])
        except TimeoutError:
            self.kill()
        codes = {name: await child.exited for name, child in self._children.items()}
        return [Exit(name, code) for name, code in codes.items() if code not in (0, -signal.SIGTERM)]

    def kill(self) -> None:
        """Ends all children at once."""
        for child in self._children.values():
            child.send(signal.SIGKILL)
