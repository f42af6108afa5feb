"""`tandem up` as a process: what it prints, how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path


async def _up(model: Path, *arguments: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "tests.cli.scripted_tandem", "up", "--model", str(model), "--port", "0", "--http-port", "0", *arguments]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)


async def _read_until(process: asyncio.subprocess.Process, word: bytes) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        while word not in await process.stdout.readline():
            pass


async def _rest(process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    return output.decode()


async def test_sigterm_drains_and_exits_0(empty_model: Path) -> None:
    process = await _up(empty_model)
    await _read_until(process, b"OpenAI door http://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    output = await _rest(process)
    assert process.returncode == 0
    assert "SIGTERM: draining" in output
    assert [line.split("|")[0].strip() for line in output.splitlines() if line.endswith("| draining")] == ["gateway", "decode-0", "prefill-0"]
    assert output.endswith("tandem up: stopped\n")


async def test_signal_while_starting_drains_too(empty_model: Path) -> None:
    process = await _up(empty_model, "--prefill-args=--script unready")
    await _read_until(process, b"scripted prefill-0")
    process.send_signal(signal.SIGINT)
    output = await _rest(process)
    assert process.returncode == 0, output
    assert "prefill-0 | draining" in output


async def test_death_of_a_child_is_said_the_others_drain_and_the_exit_code_is_1(empty_model: Path) -> None:
    process = await _up(empty_model)
    assert process.stdout is not None
    async with asyncio.timeout(30):
        while b"scripted decode-0" not in (line := await process.stdout.readline()):
            pass
        decode_pid = int(line.split()[-1])
        while b"ready after" not in await process.stdout.readline():
            pass
    os.kill(decode_pid, signal.SIGKILL)
    output = await _rest(process)
    assert process.returncode == 1
    assert "decode-0 was killed by SIGKILL; stopping the others" in output
    assert "gateway   | draining" in output
    assert "prefill-0 | draining" in output


async def test_second_signal_kills(empty_model: Path) -> None:
    process = await _up(empty_model, "--gateway-args=--script stubborn")
    await _read_until(process, b"ready after")
    process.send_signal(signal.SIGINT)
    await _read_until(process, b"draining")
    process.send_signal(signal.SIGINT)
    output = await _rest(process)
    assert process.returncode == 1
    assert "gateway was killed by SIGKILL" in output


async def test_service_that_cannot_start_is_said_without_a_traceback(empty_model: Path) -> None:
    process = await _up(empty_model, "--decode-args=--script die")
    output = await _rest(process)
    assert process.returncode == 1
    assert "decode-0 exited with code 3" in output
    assert "Traceback" not in output
