"""The door in real processes: three services, the openai package, a drain; and what is imported when."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import openai
import pytest

from gateway.http.connection import ConnectionLimits
from gateway.http.running import RunningRequests
from gateway.http.server import HttpServer
from rpc.errors import StartupError
from tests.support.live_stack import live_stack, options_of, until
from tests.support.served_models import write_served_model

_ROOT = Path(__file__).parents[3]


async def test_three_processes_serve_openai_clients_and_both_doors_drain_together(tmp_path: Path) -> None:
    model = write_served_model(tmp_path / "tiny")
    async with live_stack(options_of(model, http_port=0, gateway="--drain-grace-s=30")) as stack:
        url = stack.stack.http_url
        assert url is not None
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
            completion = await client.completions.create(model="tiny", prompt=list(range(10, 60)), max_tokens=8, temperature=0, extra_body={"ignore_eos": True})
            assert completion.usage is not None
            assert completion.usage.completion_tokens == 8
            whole = completion.choices[0].text
            stream = await client.completions.create(
                model="tiny", prompt=list(range(10, 60)), max_tokens=8, temperature=0, stream=True, extra_body={"ignore_eos": True}
            )
            assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == whole
            chat = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}], max_completion_tokens=4)
            assert chat.choices[0].finish_reason in ("length", "stop")
        async with aiohttp.ClientSession(url.removesuffix("/v1")) as session:
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 800, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
            async with session.post("/v1/completions", json=body) as running:
                assert running.headers["tandem-path"] == "handover"
                await running.content.readuntil(b"\n\n")
                stack.send("gateway", signal.SIGTERM)

                async def refuses() -> bool:
                    async with session.get("/health") as health:
                        return health.status == 503

                await until(refuses, 10, "the health does not turn")
                async with session.post("/v1/completions", json=body) as refused:
                    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
                events = (await running.read()).decode().removesuffix("\n\n").split("\n\n")
                assert events[-1] == "data: [DONE]"
                assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 800
        assert await stack.exit_code("gateway", 15) == 0
        stack.assert_clean_logs()


def _program(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=_ROOT)


def test_a_gateway_without_the_door_imports_no_web_framework_and_the_door_no_torch() -> None:
    done = _program("import sys, gateway.__main__; sys.exit(str([m for m in ('starlette', 'uvicorn', 'h11') if m in sys.modules] or ''))")
    assert done.stderr.strip() == ""
    done = _program("import sys, gateway.http.door; sys.exit(str([m for m in ('torch', 'transformers', 'engine') if m in sys.modules] or ''))")
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_a_missing_extra_is_told_in_one_line(missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
from gateway.__main__ import add_http_door
from rpc.errors import StartupError
try:
    add_http_door(None, None)
except StartupError as error:
    print(error)
"""
    done = _program(code)
    assert done.stdout.strip() == f"--http-port: {missing} is not installed; the HTTP door needs the extra http: pip install 'tandem-serve[http]'", done.stderr


async def test_an_address_that_is_taken_is_told_at_the_start() -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]

    async def app(scope: object, receive: object, send: object) -> None: ...

    for host, number, words in (("127.0.0.1", port, f"--http-port: cannot listen on 127.0.0.1:{port}: Address already"), ("256.0.0.1", 0, "--http-host")):
        with pytest.raises(StartupError, match=words):
            await HttpServer(app, RunningRequests(), host=host, port=number, limits=ConnectionLimits()).start()
    taken.close()
