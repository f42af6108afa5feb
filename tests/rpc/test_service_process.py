from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
import urllib.request
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from os import environ
from pathlib import Path

from rpc.channels import control_channel
from tests.rpc.peers import method

TINY = Path(__file__).with_name("tiny_service.py")


@dataclass(frozen=True, slots=True)
class Tiny:
    """The service as a process."""

    process: Process
    port: int
    loop_module: str

    async def wait(self) -> tuple[int, str]:
        """The exit code and what was written to standard error."""
        _, errors = await asyncio.wait_for(self.process.communicate(), 20)
        assert self.process.returncode is not None
        return self.process.returncode, errors.decode()


async def _start(mode: str, *flags: str, env: Mapping[str, str] | None = None) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, str(TINY), mode, *flags, stdout=PIPE, stderr=PIPE, env={**environ, **(env or {})})


@asynccontextmanager
async def _tiny(mode: str = "serve", *flags: str, env: Mapping[str, str] | None = None) -> AsyncIterator[Tiny]:
    process = await _start(mode, *flags, env=env)
    assert process.stdout is not None
    try:
        port, loop_module = (await asyncio.wait_for(process.stdout.readline(), 20)).decode().split()
        yield Tiny(process, int(port), loop_module)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_sigterm_lets_the_running_request_end_and_exits_with_zero() -> None:
    async with _tiny() as tiny, control_channel(f"127.0.0.1:{tiny.port}") as channel:
        call = method(channel, "unary_unary", "/tandem.test.Tiny/Wait")(b"0.5", timeout=10)
        assert tiny.process.stdout is not None
        assert await asyncio.wait_for(tiny.process.stdout.readline(), 10) == b"waiting\n"
        tiny.process.send_signal(signal.SIGTERM)
        assert await call == b"0.5"
        code, errors = await tiny.wait()

    assert code == 0, errors
    assert tiny.loop_module.startswith("uvloop")
    assert "received SIGTERM" in errors and "Traceback" not in errors


async def test_second_signal_ends_at_once() -> None:
    async with _tiny() as tiny, control_channel(f"127.0.0.1:{tiny.port}") as channel:
        call = method(channel, "unary_unary", "/tandem.test.Tiny/Wait")(b"30", timeout=40)
        assert tiny.process.stdout is not None and tiny.process.stderr is not None
        assert await asyncio.wait_for(tiny.process.stdout.readline(), 10) == b"waiting\n"
        tiny.process.send_signal(signal.SIGINT)
        while b"drains 1 requests" not in await asyncio.wait_for(tiny.process.stderr.readline(), 10):
            pass
        started_s = time.monotonic()
        tiny.process.send_signal(signal.SIGINT)
        code, _ = await tiny.wait()
        call.cancel()

    assert code == 128 + signal.SIGINT and time.monotonic() - started_s < 2


async def test_second_signal_ends_a_process_whose_loop_is_blocked() -> None:
    async with _tiny("block") as tiny:
        assert tiny.process.stdout is not None
        assert await asyncio.wait_for(tiny.process.stdout.readline(), 10) == b"blocked\n"
        # Two different ones: equal signals that are pending at once are one.
        tiny.process.send_signal(signal.SIGTERM)
        tiny.process.send_signal(signal.SIGINT)
        code, _ = await tiny.wait()

    assert code in (128 + signal.SIGTERM, 128 + signal.SIGINT)


async def test_uncaught_error_and_dead_engine_exit_with_one_and_a_traceback() -> None:
    async with _tiny("raise") as raising, _tiny("fail") as failing:
        raised, failed = await raising.wait(), await failing.wait()

    assert raised[0] == 1 and "Traceback" in raised[1] and "broken on purpose" in raised[1]
    assert failed[0] == 1 and "the engine is dead" in failed[1]


async def test_errors_of_the_operator_exit_with_two_and_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            f"127.0.0.1:{port}": _start("serve", "--port", port),
            "--metrics-port": _start("serve", "--metrics-port", port),
            "--drain-grace-s": _start("serve", "--drain-grace-s", "soon"),
            "TANDEM_FAILPOINTS": _start("serve", env={"TANDEM_FAILPOINTS": "nowhere=delay:1"}),
            "OTEL_EXPORTER_OTLP_PROTOCOL": _start(
                "serve", env={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
            ),
        }
        processes = dict(zip(cases, await asyncio.gather(*cases.values()), strict=True))
        for named, process in processes.items():
            _, errors = await asyncio.wait_for(process.communicate(), 30)
            assert process.returncode == 2, errors
            assert named in errors.decode() and b"Traceback" not in errors


async def test_metrics_are_served_on_loopback_and_json_logs_are_json() -> None:
    async with _tiny("serve", "--log-format", "json", env={"TANDEM_FAILPOINTS": "decode=delay:0.1"}) as tiny:
        assert tiny.process.stderr is not None
        lines: list[dict[str, str]] = []
        while not any(line["message"] == "serving" for line in lines):
            lines.append(json.loads(await asyncio.wait_for(tiny.process.stderr.readline(), 10)))
        (url,) = (line["message"].split()[-1] for line in lines if line["message"].startswith("metrics at"))
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
        tiny.process.send_signal(signal.SIGTERM)
        code, errors = await tiny.wait()

    assert code == 0, errors
    assert url.startswith("http://127.0.0.1:") and "process_cpu_seconds_total" in page
    assert {line["service"] for line in lines} == {"tiny"}
    assert any(line["level"] == "warning" and "FAILPOINTS" in line["message"] for line in lines)


async def test_unreachable_collector_does_not_hold_the_exit() -> None:
    async with _tiny(env={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) as tiny, control_channel(f"127.0.0.1:{tiny.port}") as channel:
        await method(channel, "unary_unary", "/tandem.test.Tiny/Wait")(b"0", timeout=10)
        started_s = time.monotonic()
        tiny.process.send_signal(signal.SIGTERM)
        code, errors = await tiny.wait()

    assert code == 0, errors
    assert time.monotonic() - started_s < 8
