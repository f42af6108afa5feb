"""Two prefill workers and a decode worker, each a process of its own."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

from checks.handover_faults_lanes import Lane
from checks.handover_faults_process import WorkerProcess
from checks.handover_faults_worker import WorkerSpec
from tandem.v1 import decode_pb2, decode_pb2_grpc

BLOCK_SIZE = 8
_GIVEN: set[int] = set()
_PAIRED_S, _ANSWER_S, _POLL_S = 60.0, 30.0, 0.005
_WORKER = (
    *("--dtype=float32", "--num-threads=1", f"--block-size={BLOCK_SIZE}", "--max-model-len=256", "--metrics-port=-1", "--no-reflection"),
    *("--max-num-seqs=4", "--max-num-batched-tokens=64", "--max-prefill-tokens-per-step=64", "--reserve-output-tokens=16"),
)
PREFILL_ARGUMENTS = (*_WORKER, "--num-blocks=32")
"""A pool as large as its longest prompt: one such computes into every block."""
DECODE_ARGUMENTS = (*_WORKER, "--num-blocks=64")


@dataclass(frozen=True, slots=True)
class Cluster:
    """One decode worker that prefers `prefill` and has `spare`."""

    transport: str
    prefill: WorkerProcess
    spare: WorkerProcess
    decode: WorkerProcess

    @property
    def workers(self) -> tuple[WorkerProcess, ...]:
        """All three."""
        return self.prefill, self.spare, self.decode

    async def paired(self) -> None:
        """Waits until decode reads from both by the transport."""
        async with asyncio.timeout(_PAIRED_S):
            while not await self.is_paired():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    async def is_paired(self) -> bool:
        """Decode says that it reads from both by the transport."""
        call = decode_pb2_grpc.DecodeServiceStub(self.decode.channel).WatchLoad(decode_pb2.DecodeServiceWatchLoadRequest(), timeout=_ANSWER_S)
        try:
            paths = (await call.read()).load.kv_paths
            return [path.transport for path in paths] == [self.transport, self.transport]
        finally:
            call.cancel()


@asynccontextmanager
async def running_cluster(context: ForkServerContext, model: Path, lane: Lane, *options: str, log: Path, verifies: bool = True) -> AsyncIterator[Cluster]:
    """Starts the three and drains them in the end; `options` are decode's."""
    ports = _free_ports(3)
    both = (f"--model={model}", *lane.options, f"--kv-transports={lane.transport}", f"--kv-socket-dir={model.parent / 'sockets'}")
    names = {"p0": ports[0], "p1": ports[1]}
    targets = ",".join(f"{name}=127.0.0.1:{port}" for name, port in names.items())
    decode_arguments = (*DECODE_ARGUMENTS, *both, f"--prefill={targets}", f"--port={ports[2]}", *options)

    def prefill(name: str) -> WorkerProcess:
        return WorkerProcess(context, name, WorkerSpec("prefill", (*PREFILL_ARGUMENTS, *both, f"--port={names[name]}"), log, verifies), names[name])

    decode = WorkerProcess(context, "d", WorkerSpec("decode", decode_arguments, log, verifies), ports[2])
    cluster = Cluster(lane.transport, prefill("p0"), prefill("p1"), decode)
    try:
        for worker in cluster.workers:
            await worker.start()
        await asyncio.gather(*(worker.ready() for worker in cluster.workers))
        await cluster.paired()
        yield cluster
    finally:
        results = await asyncio.gather(*(worker.stop() for worker in reversed(cluster.workers)), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to clients: a worker that was killed finds its own free again. None is given twice."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if port not in _GIVEN:
                _GIVEN.add(port)
                ports.append(port)
    return ports
