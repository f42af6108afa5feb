"""The servers under test, each as a user of one machine starts it: one model directory, bfloat16, all cores, an OpenAI door on 127.0.0.1."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import IO, Protocol

import aiohttp
import psutil

from checks.clients_environment import Environment
from checks.clients_known import VLLM
from checks.handover_bench_machine import cores
from cli.errors import UserError
from cli.stack import Stack, StackOptions

VLLM_PEER: Environment = replace(VLLM, folder=Path(".venv-peers"), alias="vllm==0.32.0+cpu")
"""As the clients' one, but by a version that says what it is built for: vLLM's server asks for that."""
MAX_MODEL_LEN = 4096
KV_GIB = 2
_READY_S = 600.0
"""vLLM compiles at its first start."""
_END_S = 60.0
_POLL_S = 0.25
_TAIL_LINES = 30
_PROBE = aiohttp.ClientTimeout(total=2.0)


class PeerError(Exception):
    """A server did not come up or did not answer; the text has the tail of its log."""


class Peer(Protocol):
    """One server. `start` and `stop` by turns."""

    name: str

    @property
    def url(self) -> str:
        """Of its OpenAI door, without /v1; while it runs."""

    @property
    def command(self) -> str:
        """As a user types it; MODEL stands for the model directory."""

    @property
    def version(self) -> str: ...

    async def start(self) -> None:
        """Returns when it serves. Raises PeerError."""

    async def stop(self) -> None:
        """Ends all its processes; bounded."""


def tail(log: Path) -> str:
    """Its last lines."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


class TandemPeer:
    """A decode worker that computes prompts itself, and the gateway in front of it: what `tandem up --num-prefill=0` starts."""

    name = "tandem"
    _DECODE = f"--dtype=bfloat16 --max-model-len={MAX_MODEL_LEN} --kv-cache-memory={KV_GIB}GiB --no-enable-prefix-caching"

    def __init__(self, model: Path, log: Path) -> None:
        self._model = model
        self._log = log
        self._file: IO[str] | None = None
        self._stack: Stack | None = None

    @property
    def url(self) -> str:
        assert self._stack is not None and self._stack.http_url is not None
        return self._stack.http_url.removesuffix("/v1")

    @property
    def grpc_address(self) -> str:
        """Of its gRPC door."""
        assert self._stack is not None
        return self._stack.gateway_address

    @property
    def command(self) -> str:
        return f"TANDEM_NUM_THREADS={len(cores())} tandem up --model=MODEL --num-prefill=0 --decode-args={shlex.quote(self._DECODE)}"

    @property
    def version(self) -> str:
        return version("tandem-serve")

    async def start(self) -> None:
        """See Peer."""
        options = StackOptions(self._model, num_prefill=0, http_port=0, decode_args=self._DECODE, environment={"TANDEM_NUM_THREADS": str(len(cores()))})
        file = self._file = self._log.open("a")
        self._stack = Stack(options, lambda name, line: print(f"{name:<10}| {line}", file=file, flush=True))
        await self._stack.start()
        try:
            await self._stack.wait_until_ready(_READY_S)
        except UserError as error:
            raise PeerError(f"tandem: {error}\n{tail(self._log)}") from None

    async def stop(self) -> None:
        """See Peer."""
        if self._stack is not None:
            await self._stack.drain(_END_S)
            self._stack = None
        if self._file is not None:
            self._file.close()
            self._file = None


class VllmPeer:
    """`vllm serve` of vLLM's CPU build."""

    name = "vllm"

    def __init__(self, model: Path, log: Path, *, compiled: bool = True) -> None:
        self._model = model
        self._log = log
        self._compiled = compiled
        self._port = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def command(self) -> str:
        variables = " ".join(f"{name}={value}" for name, value in self._variables().items()).replace(f"{VLLM_PEER.path}/", "")
        return f"{variables} vllm serve MODEL {shlex.join(self._flags())}"

    @property
    def version(self) -> str:
        return VLLM.packages[0].partition("==")[2]

    def _variables(self) -> Mapping[str, str]:
        # By vLLM's own advice; its packages bring Intel's OpenMP along, tcmalloc is the system's. Without the first one it is slower by a third here.
        preloaded = [str(VLLM_PEER.path / "lib" / "libiomp5.so"), *filter(None, [find_library("tcmalloc_minimal")])]
        return {
            "LD_PRELOAD": ":".join(preloaded),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": core_ranges(cores()),
            # Its cache of whole compiled models fails to load in this build, and each start would compile anew.
            "VLLM_USE_AOT_COMPILE": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }

    def _flags(self) -> Sequence[str]:
        flags = ["--served-model-name=m", "--dtype=bfloat16", f"--max-model-len={MAX_MODEL_LEN}", "--no-enable-prefix-caching"]
        return flags if self._compiled else [*flags, "--enforce-eager"]

    async def start(self) -> None:
        """See Peer."""
        self._port = _free_port()
        program = [str(VLLM_PEER.path / "bin" / "vllm"), "serve", str(self._model), "--host=127.0.0.1", f"--port={self._port}", *self._flags()]
        with self._log.open("a") as file:
            self._process = await asyncio.create_subprocess_exec(
                *child_command(program),
                env={**os.environ, **self._variables()},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(_READY_S), aiohttp.ClientSession(timeout=_PROBE) as session:
                while not await self._is_healthy(session):
                    if self._process.returncode is not None:
                        raise PeerError(f"vllm ended with {self._process.returncode} before it was ready\n{tail(self._log)}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise PeerError(f"vllm was not ready after {_READY_S:g} s\n{tail(self._log)}") from None

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def stop(self) -> None:
        """See Peer. Its engine and workers are processes of their own, which it may leave behind."""
        if self._process is None:
            return
        await end_tree(self._process)
        self._process = None


def child_command(program: Sequence[str]) -> list[str]:
    """The command line of a child that dies with this process."""
    return [sys.executable, "-m", "checks.peers_child", str(os.getpid()), *program]


async def end_tree(process: asyncio.subprocess.Process) -> None:
    """SIGTERM to a child, SIGKILL to it and to those of its descendants that are left after a while; returns when all are gone."""
    try:
        below = psutil.Process(process.pid).children(recursive=True) if process.returncode is None else []
    except psutil.NoSuchProcess:
        below = []
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
    _, left = await asyncio.to_thread(psutil.wait_procs, below, 5.0)
    for each in left:
        each.kill()
    _, left = await asyncio.to_thread(psutil.wait_procs, left, 5.0)
    if left:
        raise PeerError(f"processes {[each.pid for each in left]} of {process.pid} do not end")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def core_ranges(numbers: Sequence[int]) -> str:
    """As VLLM_CPU_OMP_THREADS_BIND names them: 0-3,8 for 0, 1, 2, 3, 8."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found)
