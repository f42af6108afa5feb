from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rpc.channels import control_channel
from rpc.errors import StartupError, StatusError
from rpc.server import RpcServer
from tandem.v1 import gateway_pb2, gateway_pb2_grpc
from tests.rpc.peers import serving

GATEWAY = "tandem.v1.GatewayService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class _Gate:
    """A handler that waits to be let through."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.open = asyncio.Event()
        self.cancelled = asyncio.Event()

    def behaviour(self) -> Any:
        async def wait(request: bytes, _context: Any) -> bytes:
            self.began.set()
            try:
                await self.open.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            return request

        return wait


async def _health(stub: Any, service: str) -> Any:
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status


async def test_liveness_and_readiness_are_apart_and_watch_follows() -> None:
    server = RpcServer("gateway")
    server.add(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, gateway_pb2_grpc.GatewayServiceServicer(), GATEWAY)
    port = await server.start()
    async with control_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert await _health(stub, "") == SERVING
        assert await _health(stub, GATEWAY) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _health(stub, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

        watch = stub.Watch(health_pb2.HealthCheckRequest(service=GATEWAY), timeout=10)
        seen = [(await watch.read()).status]
        server.set_ready(True)
        seen.append((await watch.read()).status)
        server.set_ready(False, "the engine is dead")
        seen.append((await watch.read()).status)
        server.set_ready(True)
        seen.append((await watch.read()).status)
        assert seen == [NOT_SERVING, SERVING, NOT_SERVING, SERVING]
        assert await _health(stub, "") == SERVING

        drain = asyncio.create_task(server.drain(5))
        assert (await watch.read()).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await watch.read()
        assert await drain


async def test_reflection_lists_the_services_and_describes_them() -> None:
    server = RpcServer("gateway")
    server.add(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, gateway_pb2_grpc.GatewayServiceServicer(), GATEWAY)
    port = await server.start()
    async with control_channel(f"127.0.0.1:{port}") as channel:
        make_stub: Any = reflection_pb2_grpc.ServerReflectionStub  # its type knows synchronous channels only
        stub = make_stub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=GATEWAY),
        ]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(asked), timeout=5)]
    await server.drain(1)

    assert {service.name for service in listed.list_services_response.service} >= {GATEWAY, "grpc.health.v1.Health"}
    assert any(b"GatewayService" in proto for proto in described.file_descriptor_response.file_descriptor_proto)


async def test_generated_servicer_without_a_body_is_unimplemented() -> None:
    server = RpcServer("gateway", reflection=False)
    server.add(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, gateway_pb2_grpc.GatewayServiceServicer(), GATEWAY)
    port = await server.start()
    async with control_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway_pb2_grpc.GatewayServiceStub(channel).ListModels(gateway_pb2.ListModelsRequest(), timeout=5)
    await server.drain(1)

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_taken_port_is_a_startup_error_that_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}"):
            await RpcServer("test", port=port).start()


async def test_two_servers_cannot_share_a_port() -> None:
    first = RpcServer("first")
    port = await first.start()
    with pytest.raises(StartupError):
        await RpcServer("second", port=port).start()
    await first.drain(1)


async def test_drain_refuses_new_requests_and_waits_for_the_running_one() -> None:
    gate = _Gate()

    async def answer(request: bytes, context: Any) -> None:
        await context.write(request)

    async with serving(UnaryUnary=gate.behaviour(), ReadKv=answer) as pair:
        running = asyncio.ensure_future(pair.call("UnaryUnary", b"kept", timeout=10))
        await asyncio.wait_for(gate.began.wait(), 5)
        drain = asyncio.create_task(pair.server.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.call("UnaryUnary", b"late", timeout=5)
        refused = StatusError.of(caught.value)
        # A hand-over that is under way still has bytes to fetch.
        assert [chunk async for chunk in pair.call("ReadKv", b"chunk", timeout=5)] == [b"chunk"]
        assert pair.server.draining and not drain.done()
        gate.open.set()
        assert await running == b"kept"
        assert await asyncio.wait_for(drain, 5)

    assert (refused.code, refused.reason, refused.retry_after_s) == (grpc.StatusCode.UNAVAILABLE, "DRAINING", 1.0)


async def test_drain_cancels_what_outlives_the_grace_and_says_why() -> None:
    gate = _Gate()
    async with serving(UnaryUnary=gate.behaviour()) as pair:
        running = asyncio.ensure_future(pair.call("UnaryUnary", b"", timeout=10))
        await asyncio.wait_for(gate.began.wait(), 5)
        finished = await pair.server.drain(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running

    assert not finished and gate.cancelled.is_set()
    assert StatusError.of(caught.value).reason == "DRAINING"


async def test_handler_that_swallows_the_drains_cancel_does_not_end_with_ok() -> None:
    began = asyncio.Event()

    async def swallow(_request: bytes, context: Any) -> None:
        await context.write(b"half")
        began.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async with serving(UnaryStream=swallow) as pair:
        call = pair.call("UnaryStream", b"", timeout=10)
        assert await call.read() == b"half"
        await asyncio.wait_for(began.wait(), 5)
        assert not await pair.server.drain(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert StatusError.of(caught.value).reason == "DRAINING"


async def test_drain_does_not_wait_for_watches_and_ends_them_with_a_status() -> None:
    async def watch(_request: bytes, context: Any) -> None:
        await context.send_initial_metadata(())
        await context.write(b"load")
        await asyncio.Event().wait()

    async with serving(WatchLoad=watch) as pair:
        call = pair.call("WatchLoad", b"", timeout=10)
        assert await call.read() == b"load"
        assert pair.server.num_active_rpcs == 0
        assert await asyncio.wait_for(pair.server.drain(30), 5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

    assert StatusError.of(caught.value).reason == "DRAINING"


async def test_metadata_of_a_client_is_bounded() -> None:
    async def answer(request: bytes, _context: Any) -> bytes:
        return request

    async with serving(UnaryUnary=answer) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.call("UnaryUnary", b"", metadata=(("x", "y" * (64 << 10)),), timeout=5)
        assert await pair.call("UnaryUnary", b"next", timeout=5) == b"next"

    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
