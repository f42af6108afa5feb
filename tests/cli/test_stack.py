"""Services as children: readiness, death, order of draining, and dying with the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from cli.errors import UserError
from cli.stack import Stack, StackOptions

pytestmark = pytest.mark.usefixtures("scripted_stack")

Lines = list[tuple[str, str]]


def _stack(model: Path, lines: Lines, *, prefill: str = "", decode: str = "", gateway: str = "") -> Stack:
    options = StackOptions(
        model,
        prefill_args=f"--script={prefill}",
        decode_args=f"--script={decode}",
        gateway_args=f"--script={gateway}",
    )
    return Stack(options, lambda name, line: lines.append((name, line)))


async def test_services_become_ready_and_drain_gateway_first(empty_model: Path) -> None:
    lines: Lines = []
    stack = _stack(empty_model, lines)
    await stack.start()
    await stack.wait_until_ready(30)
    assert await stack.drain(10) == []
    assert [name for name, line in lines if line == "draining"] == ["gateway", "decode-0", "prefill-0"]


async def test_child_that_dies_is_named_with_its_exit_code(empty_model: Path) -> None:
    stack = _stack(empty_model, [], decode="die")
    await stack.start()
    with pytest.raises(UserError, match="decode-0 exited with code 3 before it was ready"):
        await stack.wait_until_ready(30)
    assert [str(one) for one in await stack.drain(10)] == ["decode-0 exited with code 3"]


async def test_service_that_never_gets_ready_is_named_when_the_time_is_over(empty_model: Path) -> None:
    stack = _stack(empty_model, [], prefill="unready")
    await stack.start()
    with pytest.raises(UserError, match="not ready after 2 s: prefill-0"):
        await stack.wait_until_ready(2)
    assert await stack.drain(10) == []


async def test_child_that_ignores_sigterm_is_killed_after_the_bound(empty_model: Path) -> None:
    stack = _stack(empty_model, [], gateway="stubborn")
    await stack.start()
    await stack.wait_until_ready(30)
    assert "gateway was killed by SIGKILL" in [str(one) for one in await stack.drain(1)]


async def test_last_words_of_a_child_are_passed_on(empty_model: Path) -> None:
    lines: Lines = []
    stack = _stack(empty_model, lines)
    await stack.start()
    await stack.wait_until_ready(30)
    await stack.drain(10)
    assert {name for name, line in lines if line.startswith("scripted ")} == {"gateway", "decode-0", "prefill-0"}


async def test_taken_port_is_told_before_anything_starts(empty_model: Path) -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(UserError, match=f"port {port} .*Address already in use"):
        Stack(StackOptions(empty_model, gateway_port=port), lambda name, line: None)
    server.close()


def test_missing_model_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model directory"):
        StackOptions(tmp_path)


async def test_children_die_with_a_killed_parent(empty_model: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.cli.scripted_tandem", "up", "--model", str(empty_model), "--port", "0", "--http-port=-1", stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(30):
        while b"ready after" not in await parent.stdout.readline():
            pass
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) == 3
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
    assert alive == []
