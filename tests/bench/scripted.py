"""Servers that do exactly what a test says: a gateway over gRPC, and one over HTTP that sends bytes as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.plan import Loop, Plan, PlannedRequest
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2, load_pb2

WAIT_S = 20.0


def plan_of_times(*due_s: float, max_tokens: int = 3, num_warm_up: int = 0) -> Plan:
    """An open loop; the first prompt token of a request is its index."""
    requests = tuple(PlannedRequest(index, (index, 7, 8), max_tokens, due, index < num_warm_up) for index, due in enumerate(due_s))
    return Plan(requests, Loop.OPEN, "fixed", "times of a test", 1.0, 0)


def closed_plan(num_requests: int, concurrency: int, max_tokens: int = 3) -> Plan:
    requests = tuple(PlannedRequest(index, (index, 7, 8), max_tokens) for index in range(num_requests))
    return Plan(requests, Loop.CLOSED, "fixed", f"concurrency {concurrency}", 1.0, 0, concurrency)


# gRPC

Script = Callable[[gateway_pb2.GenerateRequest, Any], Awaitable[None]]
"""Takes a request and its context."""


async def answer(request: gateway_pb2.GenerateRequest, context: Any, *, gap_s: float = 0.0, first_s: float = 0.0) -> None:
    """What was asked for, one token a message."""
    await asyncio.sleep(first_s)
    wanted = request.sampling_params.max_tokens
    for position in range(wanted):
        if position:
            await asyncio.sleep(gap_s)
        await context.write(token_message(position))
    context.set_trailing_metadata((("tandem-path", "handover"),))
    await context.write(last_message(wanted, len(request.token_ids.ids)))


def token_message(position: int, num_tokens: int = 1, text: str = "x") -> gateway_pb2.GenerateResponse:
    return gateway_pb2.GenerateResponse(text=text, token_ids=[5] * num_tokens, position=position)


def last_message(
    num_tokens: int, num_prompt_tokens: int = 3, reason: generation_pb2.FinishReason = generation_pb2.FINISH_REASON_LENGTH
) -> gateway_pb2.GenerateResponse:
    usage = generation_pb2.Usage(
        prompt_tokens=num_prompt_tokens, completion_tokens=num_tokens, total_tokens=num_tokens + num_prompt_tokens, cached_tokens=min(2, num_prompt_tokens)
    )
    return gateway_pb2.GenerateResponse(finish=generation_pb2.Finish(finish_reason=reason), usage=usage)


class ScriptedGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers by the script of a request's first prompt token; `answer` for those without one, and for the cold start."""

    def __init__(self, scripts: dict[int, Script]) -> None:
        self.scripts = scripts
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.num_running = 0
        self.target = ""

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        self.num_running += 1
        try:
            await self.scripts.get(request.token_ids.ids[0], answer)(request, context)
        finally:
            self.num_running -= 1

    async def ListModels(self, request: gateway_pb2.ListModelsRequest, context: Any) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse(models=[gateway_pb2.Model(id="m", max_model_len=4096, vocab_size=1000)])

    async def GetStatus(self, request: gateway_pb2.GetStatusRequest, context: Any) -> gateway_pb2.GetStatusResponse:
        loads = [load_pb2.LoadReport(num_blocks=100, num_free_blocks=free) for free in (75, 40)]
        instances = [gateway_pb2.InstanceStatus(name=f"d{i}", role=gateway_pb2.INSTANCE_ROLE_DECODE, load=load) for i, load in enumerate(loads)]
        return gateway_pb2.GetStatusResponse(version="9.9", num_requests_running=self.num_running, num_requests_waiting=4, instances=instances)


@asynccontextmanager
async def scripted_gateway(scripts: dict[int, Script] | None = None) -> AsyncIterator[ScriptedGateway]:
    """Listens on 127.0.0.1."""
    servicer = ScriptedGateway({} if scripts is None else scripts)
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(None)


# HTTP

MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 4096}]}).encode()
METRICS = b"""# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""


@dataclass
class Asked:
    """A POST as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


HttpScript = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class ScriptedHttp:
    script: HttpScript
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    url: str = ""
    pages: dict[str, bytes] = field(default_factory=lambda: {"/v1/models": MODELS, "/metrics": METRICS, "/version": b'{"version":"0.32.0"}'})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, kept alive."""
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *rest = head.decode().split("\r\n")[:-2]
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
                method, path, _ = first.split()
                raw = await reader.readexactly(int(headers.get("content-length", "0")))
                if method == "GET":
                    page = self.pages.get(path)
                    await send_whole(writer, 404 if page is None else 200, page or b"{}", content_type="application/json")
                    continue
                self.asked.append(Asked(path, headers, json.loads(raw)))
                await self.script(self.asked[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def send_whole(writer: asyncio.StreamWriter, status: int, body: bytes, *, content_type: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {content_type}\r\nServer: scripted\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


async def send_stream(writer: asyncio.StreamWriter, pieces: Sequence[bytes | float]) -> None:
    """Bytes as chunks of the body; a number is a pause in seconds."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n")
    for piece in pieces:
        if isinstance(piece, float):
            await asyncio.sleep(piece)
        else:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def event(chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def usage_of(num_tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 3, "completion_tokens": num_tokens, "total_tokens": 3 + num_tokens, "prompt_tokens_details": {"cached_tokens": 1}}


def text_event(text: str, *, tokens: int | None = None, finish: str | None = None) -> bytes:
    """Of /v1/completions; `tokens`: all so far."""
    chunk: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}
    return event(chunk | ({} if tokens is None else {"usage": usage_of(tokens)}))


def whole_stream(num_tokens: int, *, continuous: bool = True, finish: str = "length") -> list[bytes]:
    """One token a message, the usage apart, and the end."""
    events = [text_event("x", tokens=number if continuous else None, finish=finish if number == num_tokens else None) for number in range(1, num_tokens + 1)]
    return [*events, event({"choices": [], "usage": usage_of(num_tokens)}), DONE]


async def answer_http(asked: Asked, writer: asyncio.StreamWriter) -> None:
    await send_stream(writer, whole_stream(asked.body["max_tokens"]))


@asynccontextmanager
async def scripted_http(script: HttpScript = answer_http) -> AsyncIterator[ScriptedHttp]:
    """Listens on 127.0.0.1."""
    peer = ScriptedHttp(script)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield peer
    finally:
        server.close()
