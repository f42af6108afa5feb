"""Prefill and decode services over fake engines, with real gRPC servers on 127.0.0.1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from decode_svc.kv_path_events import kv_path_events
from decode_svc.pairing import NOT_PAIRED_YET
from decode_svc.peers import KvParts, KvSettings, PrefillPeers
from decode_svc.pool import DecodePool, FailurePolicy, PrefillPace
from decode_svc.servicer import DecodeServicer
from engine.async_engine import AsyncEngine
from engine.proto import sampling_params_to_proto
from kvtransfer.quarantine import Quarantine
from kvtransfer.transport import NAMES
from prefill_svc.pool import PrefillPool, open_pool
from prefill_svc.servicer import PrefillServicer
from rpc.channels import control_channel
from rpc.server import RpcServer
from tandem.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from telemetry.metrics import WorkerMetrics
from tests.support.alone import sampling_of
from tests.support.answer import Answer
from tests.support.engines import running_fake_engine
from tests.support.fake_device import FakeDevice
from tests.support.held import assert_nothing_held
from worker.load import LoadWatch


def metrics(role: str) -> WorkerMetrics:
    """Metrics in a registry of their own."""
    return WorkerMetrics("fake", role, CollectorRegistry())


@dataclass
class PrefillNode:
    """A prefill worker."""

    name: str
    engine: AsyncEngine
    device: FakeDevice
    pool: PrefillPool
    load: LoadWatch
    server: RpcServer
    stub: Any
    channel: grpc.aio.Channel
    pairing_id: str = ""
    """Of a test that pairs by hand."""

    async def kill(self) -> None:
        """Its connections break at once, as when the process dies."""
        await self.server._server.stop(None)


@dataclass
class DecodeNode:
    """A decode worker."""

    engine: AsyncEngine
    device: FakeDevice
    pool: DecodePool
    load: LoadWatch
    server: RpcServer
    stub: Any


@dataclass
class Cluster:
    """One decode worker and its prefill workers."""

    prefills: list[PrefillNode]
    decode: DecodeNode

    def request(self, prompt: Sequence[int], *, prefill: str = "p0", output: Sequence[int] = (), **params: Any) -> decode_pb2.DecodeServiceGenerateRequest:
        """A request; `params` as of SamplingParams, greedy by default."""
        sampling = sampling_of(params)
        return decode_pb2.DecodeServiceGenerateRequest(
            request_id="r",
            prompt_token_ids=prompt,
            output_token_ids=output,
            sampling_params=sampling_params_to_proto(sampling),
            prefill_instance=prefill,
            sample_index=sampling.sample_index,
        )

    async def generate(self, request: decode_pb2.DecodeServiceGenerateRequest, timeout_s: float = 20.0) -> Answer:
        """Runs a request to its end."""
        answer = Answer()
        async for response in self.decode.stub.Generate(request, timeout=timeout_s):
            answer.take(response)
        return answer

    async def assert_nothing_held(self) -> None:
        """In none of the engines whose thread lives, and no reader is in quarantine."""
        engines = [self.decode.engine, *(node.engine for node in self.prefills)]
        await assert_nothing_held(*(engine for engine in engines if engine.death is None))
        assert not self.decode.pool.quarantine.reader_ids
        assert not any(len(node.pool.holds) for node in self.prefills)


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Waits until a condition holds that nothing announces."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@asynccontextmanager
async def open_prefill(
    name: str, *, port: int = 0, transports: Sequence[str] = NAMES, max_request_time_s: float = 600.0, **options: Any
) -> AsyncIterator[PrefillNode]:
    """A running prefill worker."""
    async with running_fake_engine(**options) as (engine, device), open_pool(engine, metrics("prefill"), transports=transports) as pool:
        load = LoadWatch(engine, "fake")
        server = RpcServer(name, port=port)
        PrefillServicer(pool, load, max_request_time_s=max_request_time_s).add_to(server)
        port = await server.start()
        server.set_ready(True)
        load.set_ready(True)
        channel = control_channel(f"127.0.0.1:{port}")
        try:
            yield PrefillNode(name, engine, device, pool, load, server, prefill_pb2_grpc.PrefillServiceStub(channel), channel)
        finally:
            await channel.close()
            if device.gate is not None:
                device.gate.set()
            await server.drain(0.1)


@asynccontextmanager
async def open_decode(
    targets: Mapping[str, str],
    *,
    kv: KvSettings | None = None,
    policy: FailurePolicy | None = None,
    max_request_time_s: float = 600.0,
    **options: Any,
) -> AsyncIterator[DecodeNode]:
    """A running decode worker."""
    async with AsyncExitStack() as stack:
        engine, device = await stack.enter_async_context(running_fake_engine(**options))
        executor = stack.enter_context(ThreadPoolExecutor(1))
        load, counted = LoadWatch(engine, "fake"), metrics("decode")
        parts = KvParts.of(engine.kv_cache, executor, kv or KvSettings(transports=("inline",), checksum=True, min_bytes_per_s=1))
        peers = PrefillPeers(targets, parts, kv_path_events(counted, load))
        stack.push_async_callback(peers.close)
        load.set_kv_paths(peers.kv_paths)
        peers.start()
        pool = DecodePool(engine, peers, Quarantine(), policy or FailurePolicy(), counted, PrefillPace(), max_request_time_s)
        server = RpcServer("decode")
        DecodeServicer(pool, load).add_to(server)
        port = await server.start()
        server.set_ready(True)
        load.set_ready(True)
        stack.push_async_callback(server.drain, 0.1)
        channel = await stack.enter_async_context(control_channel(f"127.0.0.1:{port}"))
        yield DecodeNode(engine, device, pool, load, server, decode_pb2_grpc.DecodeServiceStub(channel))


@asynccontextmanager
async def open_cluster(
    *,
    num_prefills: int = 1,
    transports: Sequence[str] = ("inline",),
    checksum: bool = True,
    kv: KvSettings | None = None,
    policy: FailurePolicy | None = None,
    prefill_options: dict[str, Any] | None = None,
    decode_options: dict[str, Any] | None = None,
    max_request_time_s: float = 600.0,
) -> AsyncIterator[Cluster]:
    """A running cluster whose workers have paired, or know why not; options of the engines as of `fake_parts`. `kv` is in place of transports and checksum."""
    async with AsyncExitStack() as stack:
        prefills = [await stack.enter_async_context(open_prefill(f"p{index}", **(prefill_options or {}))) for index in range(num_prefills)]
        kv = kv or KvSettings(transports=transports, checksum=checksum, min_bytes_per_s=1)
        opening = open_decode(addresses(prefills), kv=kv, policy=policy, max_request_time_s=max_request_time_s, **(decode_options or {}))
        decode = await stack.enter_async_context(opening)
        await until(lambda: all(path.reason != NOT_PAIRED_YET for path in decode.pool.peers.kv_paths()))
        yield Cluster(prefills, decode)


def addresses(prefills: Sequence[PrefillNode]) -> dict[str, str]:
    """Where they listen, by their names."""
    return {node.name: f"127.0.0.1:{node.server.port}" for node in prefills}
