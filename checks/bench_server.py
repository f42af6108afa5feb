"""A server with known delays, in a process of its own: the gateway's Generate over gRPC, and completions over HTTP. It notes when it sent what.

It prints its two addresses as one line of JSON, and takes commands from its standard input, one line of JSON each:
{"faults": bool}, {"slow_first": N, "by_s": S} (the next N requests are served well, and later by S), {"stall_at_s": T, "for_s": S} (stops the whole
process), {"take": true} (answers with all that it has noted, and forgets it). Times are time.monotonic(), which processes of one host share.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc

from checks.bench_delays import Kind, course_of, key_of
from tandem.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2

MODEL = "known-delays"
_MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}]}).encode()
_MAX_HEAD, _MAX_BODY = 1 << 16, 1 << 22
_STOP_S = 2.0


@dataclass(slots=True)
class Served:
    """One request as the server knows it."""

    key: int
    kind: Kind
    received_s: float
    slowed_s: float
    sent_s: list[float] = field(default_factory=list)
    """When each token was handed to the transport."""
    late_s: float = 0.0
    """The most that one was behind its time."""
    ended_s: float = 0.0


class Clockwork:
    """Decides what is sent when, and notes it."""

    def __init__(self) -> None:
        self.faults = False
        self._slow_first = 0
        self._slow_s = 0.0
        self._log: list[Served] = []

    def command(self, given: dict[str, Any]) -> list[dict[str, Any]] | None:
        """What `take` answers."""
        if "faults" in given:
            self.faults = bool(given["faults"])
        if "slow_first" in given:
            self._slow_first, self._slow_s = int(given["slow_first"]), float(given["by_s"])
        if "stall_at_s" in given:
            # The whole process stands still: it reads nothing, accepts nothing and sends nothing.
            asyncio.get_running_loop().call_at(given["stall_at_s"], time.sleep, given["for_s"])
        if "take" in given:
            taken, self._log = self._log, []
            return [asdict(served) for served in taken]
        return None

    def begin(self, token_ids: list[int], max_tokens: int) -> tuple[Served, tuple[float, ...]]:
        """A request that has come in, and the times of its tokens."""
        now = time.monotonic()
        first = self._slow_first > 0
        slowed_s = self._slow_s if first else 0.0
        self._slow_first -= 1
        key = key_of(token_ids)
        course = course_of(key, max_tokens, faults=self.faults and not first)
        served = Served(key, course.kind, now, slowed_s)
        self._log.append(served)
        return served, tuple(now + slowed_s + at_s for at_s in course.at_s)


async def until(at_s: float, served: Served) -> None:
    """Notes the moment."""
    while (early_s := at_s - time.monotonic()) > 0:  # noqa: ASYNC110 - a timer may fire early
        await asyncio.sleep(early_s)
    now = time.monotonic()
    served.sent_s.append(now)
    served.late_s = max(served.late_s, now - at_s)


def _usage(served: Served) -> int:
    return len(served.sent_s) + (served.kind is Kind.FALSE_USAGE)


class KnownGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """The gRPC door."""

    def __init__(self, clockwork: Clockwork) -> None:
        self._clockwork = clockwork

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> None:
        served, times = self._clockwork.begin(list(request.token_ids.ids), request.sampling_params.max_tokens)
        if served.kind is Kind.REFUSED:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        if served.kind is Kind.FAILED_FIRST:
            await context.abort(grpc.StatusCode.INTERNAL, "broken")
        for position, at_s in enumerate(times):
            await until(at_s, served)
            await context.write(gateway_pb2.GenerateResponse(text="x", token_ids=[7], position=position))
        if served.kind is Kind.FAILED_LATE:
            await context.abort(grpc.StatusCode.INTERNAL, "broken")
        served.ended_s = time.monotonic()
        short = served.kind in (Kind.SHORT, Kind.STOPPED)
        reason = generation_pb2.FINISH_REASON_STOP if short else generation_pb2.FINISH_REASON_LENGTH
        usage = generation_pb2.Usage(prompt_tokens=len(request.token_ids.ids), completion_tokens=_usage(served))
        await context.write(gateway_pb2.GenerateResponse(finish=generation_pb2.Finish(finish_reason=reason), usage=usage))

    async def ListModels(self, request: gateway_pb2.ListModelsRequest, context: Any) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse(models=[gateway_pb2.Model(id=MODEL, max_model_len=4096, vocab_size=32_000)])

    async def GetStatus(self, request: gateway_pb2.GetStatusRequest, context: Any) -> gateway_pb2.GetStatusResponse:
        return gateway_pb2.GetStatusResponse(version="known")


class KnownHttp:
    """The HTTP door, of sockets alone: between noting a time and the send call nothing lies but the head of a chunk."""

    def __init__(self, clockwork: Clockwork) -> None:
        self._clockwork = clockwork

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, kept alive until its client closes it."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.split("\r\n")
                length = next((int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length:")), 0)
                body = await reader.readexactly(min(length, _MAX_BODY))
                if first.startswith("POST /v1/completions "):
                    await self._complete(json.loads(body), writer)
                else:
                    await _whole(writer, *((200, _MODELS) if first.startswith("GET /v1/models ") else (404, b"{}")))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        served, times = self._clockwork.begin(body["prompt"], body["max_tokens"])
        if served.kind in (Kind.REFUSED, Kind.FAILED_FIRST):
            status = 429 if served.kind is Kind.REFUSED else 500
            await _whole(writer, status, json.dumps({"error": {"message": "no room", "type": "x", "code": status}}).encode())
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for at_s in times:
            await until(at_s, served)
            await _event(writer, {"choices": [{"index": 0, "text": "x"}], "usage": {"completion_tokens": len(served.sent_s)}})
        if served.kind is Kind.FAILED_LATE:
            writer.close()
            return
        reason = "stop" if served.kind in (Kind.SHORT, Kind.STOPPED) else "length"
        await _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
        await _event(writer, {"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": _usage(served)}})
        served.ended_s = time.monotonic()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()


async def _whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


async def _event(writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def serve() -> None:
    """Until its standard input ends, so that it does not outlive whoever started it."""
    clockwork = Clockwork()
    server = grpc.aio.server()
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(KnownGateway(clockwork), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    http = await asyncio.start_server(KnownHttp(clockwork).serve, "127.0.0.1", 0, limit=_MAX_HEAD, backlog=1024)
    print(json.dumps({"grpc": f"127.0.0.1:{port}", "http": f"http://127.0.0.1:{http.sockets[0].getsockname()[1]}"}), flush=True)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        answer = clockwork.command(json.loads(line))
        print(json.dumps(answer), flush=True)
    http.close()
    await server.stop(_STOP_S)


def main() -> None:
    """Runs the server."""
    gc.disable()  # minutes at most; a collection would be a delay that nobody drew
    asyncio.run(serve())


if __name__ == "__main__":
    main()
