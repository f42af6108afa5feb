from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

PEER = Path(__file__).with_name("frozen_peer.py")
# 4 s until the ping, 4 s for its answer, and one for a busy machine.
BOUND_S = 9.0


@asynccontextmanager
async def _peer(*arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(PEER), *arguments, stdout=PIPE)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def _line(process: Process, timeout_s: float) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), timeout_s)).decode().strip()


async def _server_frozen() -> tuple[str, float]:
    async with _peer("serve") as server, _peer("call", await _line(server, 20)) as client:
        assert await _line(client, 20) == "holding"
        server.send_signal(signal.SIGSTOP)
        started_s = time.monotonic()
        return await _line(client, 30), time.monotonic() - started_s


async def _client_frozen() -> tuple[str, float]:
    async with _peer("serve") as server, _peer("call", await _line(server, 20)) as client:
        assert await _line(client, 20) == "holding"
        client.send_signal(signal.SIGSTOP)
        started_s = time.monotonic()
        return await _line(server, 30), time.monotonic() - started_s


async def test_frozen_peer_is_given_up_within_nine_seconds_on_either_side() -> None:
    (client_saw, client_s), (server_saw, server_s) = await asyncio.gather(_server_frozen(), _client_frozen())

    assert (client_saw, server_saw) == ("UNAVAILABLE", "released")
    assert client_s < BOUND_S and server_s < BOUND_S, (client_s, server_s)
