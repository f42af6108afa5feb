"""A gateway with scripted workers around it, all over real gRPC on 127.0.0.1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from gateway.gateway import Gateway
from gateway.instances import Role
from gateway.limits import AdmissionLimits, RequestLimits
from gateway.pools import Peer
from gateway.served_model import ServedModel
from rpc.errors import StatusError
from rpc.server import RpcServer
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2
from tests.gateway.fake_decode import FakeDecode, FakePrefill, Script, load_report

WAIT_S = 10.0


class House:
    """What a test needs at hand."""

    def __init__(
        self, gateway: Gateway, decodes: list[FakeDecode], prefills: list[FakePrefill], channel: grpc.aio.Channel, registry: CollectorRegistry
    ) -> None:
        self.gateway = gateway
        self.decodes = decodes
        self.prefills = prefills
        self.stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        self.registry = registry

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"tandem_{name}", {"model_name": "m", **labels}) or 0.0

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition that some event of this process makes true."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110  # conditions of the servers, which have no event of their own
                await asyncio.sleep(0.002)

    async def generate(self, request: gateway_pb2.GenerateRequest, timeout: float = WAIT_S) -> tuple[list[gateway_pb2.GenerateResponse], dict[str, str]]:
        """All messages and the trailers. Raises StatusError."""
        call = self.stub.Generate(request, timeout=timeout)
        try:
            messages = [message async for message in call]
        except grpc.aio.AioRpcError as error:
            raise StatusError.of(error) from None
        return messages, {key: value for key, value in await call.trailing_metadata() if isinstance(value, str)}

    async def assert_nothing_held(self) -> None:
        await self.until(lambda: not self.gateway.admission.num_active and not self.gateway.admission.num_waiting)
        await self.until(lambda: all(decode.num_running == 0 for decode in self.decodes))
        self.gateway.generations.assert_nothing_held()
        assert all(not (i.backlog.own or i.num_own_sequences) for i in self.gateway.pools.instances.values())
        assert self.metric("num_requests_running") == self.metric("num_requests_waiting") == 0


@asynccontextmanager
async def house(
    model: ServedModel,
    *scripts: Script,
    num_prefills: int = 0,
    admission: AdmissionLimits | None = None,
    limits: RequestLimits | None = None,
    max_request_time_s: float = WAIT_S,
    **load: Any,
) -> AsyncIterator[House]:
    """One decode per script, all available, on a model renamed m."""
    decodes = [FakeDecode(load_report(model.vocab_size, sorted(model.eos_token_ids), **load), script) for script in scripts]
    prefills = [FakePrefill(load_report(model.vocab_size, sorted(model.eos_token_ids), **load)) for _ in range(num_prefills)]
    peers = [Peer(f"d{i}", f"127.0.0.1:{await decode.server.start()}", Role.DECODE) for i, decode in enumerate(decodes)]
    peers += [Peer(f"p{i}", f"127.0.0.1:{await prefill.server.start()}", Role.PREFILL) for i, prefill in enumerate(prefills)]
    registry = CollectorRegistry()
    served = ServedModel("m", model.max_model_len, model.vocab_size, model.eos_token_ids, model.tokenizer, model.longest_token_chars, model.defaults)
    gateway = Gateway(
        served,
        peers,
        RpcServer("gateway"),
        request_limits=limits or RequestLimits(),
        admission_limits=admission or AdmissionLimits(),
        max_request_time_s=max_request_time_s,
        registry=registry,
    )
    port = await gateway.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        built = House(gateway, decodes, prefills, channel, registry)
        try:
            await built.until(lambda: all(instance.available for instance in gateway.pools.instances.values()))
            yield built
            await built.assert_nothing_held()
        finally:
            await gateway.server.drain(0.1)
            await gateway.pools.stop()
            for server in (*(d.server for d in decodes), *(p.server for p in prefills)):
                await server.drain(0.01)


def ask(text: str = "hello", **fields: Any) -> gateway_pb2.GenerateRequest:
    """A request for a completion of `text`; other fields are the sampling parameters', or the request's own if it has them."""
    own = {name: fields.pop(name) for name in tuple(fields) if name in gateway_pb2.GenerateRequest.DESCRIPTOR.fields_by_name}
    request = gateway_pb2.GenerateRequest(**own)
    if request.WhichOneof("input") is None:
        request.text = text
    for name, value in fields.items():
        attribute = getattr(request.sampling_params, name)
        if name == "bad_words_ids":
            attribute.extend(generation_pb2.TokenIds(ids=run) for run in value)
        elif isinstance(value, list):
            attribute.extend(value)
        elif isinstance(value, dict):
            attribute.update(value)
        else:
            setattr(request.sampling_params, name, value)
    return request
