"""`status` and `health`."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from cli.errors import UserError
from cli.status import Health, check_health, print_status
from rpc.server import RpcServer
from tests.cli.scripted_service import add_gateway

_GATEWAY = "tandem.v1.GatewayService"


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    server = RpcServer("scripted")
    add_gateway(server)
    await server.start()
    yield server
    await server.drain(1)


async def test_health_tells_liveness_from_readiness(server: RpcServer) -> None:
    target = f"127.0.0.1:{server.port}"
    assert await check_health(target, "", 5) == (Health.SERVING, "SERVING")
    assert await check_health(target, _GATEWAY, 5) == (Health.NOT_SERVING, "NOT_SERVING")
    server.set_ready(True)
    while (await check_health(target, _GATEWAY, 5))[0] is not Health.SERVING:  # bounded by the suite's timeout
        pass


async def test_unknown_service_is_not_serving(server: RpcServer) -> None:
    assert await check_health(f"127.0.0.1:{server.port}", "tandem.v1.Nonesuch", 5) == (Health.NOT_SERVING, "service tandem.v1.Nonesuch is unknown")


async def test_nobody_there_is_unreachable() -> None:
    result, answer = await check_health("127.0.0.1:1", "", 5)
    assert result is Health.UNREACHABLE
    assert "UNAVAILABLE" in answer


def test_exit_codes_of_health() -> None:
    assert [int(one) for one in (Health.SERVING, Health.NOT_SERVING, Health.UNREACHABLE)] == [0, 1, 2]


async def test_status_shows_both_pools_and_why_an_instance_is_out(server: RpcServer) -> None:
    out = io.StringIO()
    await print_status(f"127.0.0.1:{server.port}", 5, Console(file=out, width=120))
    prefill, decode = [line for line in out.getvalue().splitlines() if line.startswith(("prefill-0", "decode-0"))][::-1]
    if prefill.startswith("decode"):
        prefill, decode = decode, prefill
    assert "ready" in prefill
    assert "7 / 100" in prefill
    assert "unreachable" in decode


async def test_status_shows_every_kv_path_its_speed_and_why_there_is_none(server: RpcServer) -> None:
    out = io.StringIO()
    await print_status(f"127.0.0.1:{server.port}", 5, Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("KV to"))
    assert [" ".join(line.split()) for line in lines[first + 1 :]] == [
        "decode-1 prefill-0 inline 1.23 shared_memory: decode is on another host",
        "decode-1 prefill-1 not paired - UNAVAILABLE nobody is there",
    ]


async def test_status_of_an_unreachable_gateway_is_one_line() -> None:
    with pytest.raises(UserError, match="cannot be reached"):
        await print_status("127.0.0.1:1", 5, Console(file=io.StringIO()))
