"""A service with health and scripted answers, started as `python -m tests.cli.scripted_service` where the real ones would be.

The same real gRPC server stands in for all three kinds; what it does beyond serving is told by SCRIPT:
  die        exits with code 3 before it is ready   unready    never becomes ready
  stubborn   ignores SIGTERM                        refuse     ends every Generate with RESOURCE_EXHAUSTED
  slow       waits for ever after the third token
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from typing import Any

import grpc

from rpc.channels import control_channel
from rpc.client import outgoing
from rpc.errors import exhausted
from rpc.server import RpcServer
from tandem.v1 import decode_pb2, decode_pb2_grpc, gateway_pb2, gateway_pb2_grpc, generation_pb2, kv_pb2, load_pb2, prefill_pb2, prefill_pb2_grpc
from telemetry.spans import FIRST_TOKEN, REQUEST_ID
from telemetry.tracing import configure_tracing, flush, span

WORDS = ("The ", "capital ", "of ", "France ", "is ", "Paris.")


class ScriptedGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers every prompt with WORDS, one token a word; further samples shout, and the first one ends last."""

    def __init__(self, script: str = "", decode: str = "") -> None:
        self.script = script
        self._decode = decode
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.requests.append(request)
        if self.script == "refuse":
            raise exhausted("QUEUE_FULL", "the queue holds 64 requests", 1.5)
        if self._decode:
            await _call("tandem.v1.DecodeService/Generate", self._decode, decode_pb2.DecodeServiceGenerateRequest(request_id=request.request_id))
        try:
            await self._answer(request, context)
        except BaseException:
            self.cancelled.set()
            raise
        context.set_trailing_metadata((("tandem-path", "handover"), ("tandem-kv-bytes", "1474560"), ("tandem-kv-transport", "inline")))

    async def _answer(self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        with span("route", attributes={REQUEST_ID: request.request_id}):
            for position, word in enumerate(WORDS):
                for index in range(request.sampling_params.n or 1):
                    text = word.upper() if index else word
                    piece = gateway_pb2.GenerateResponse(request_id=request.request_id, index=index, text=text, token_ids=[position + 5], position=position)
                    await context.write(piece)
                if self.script == "slow" and position == 2:
                    await asyncio.Event().wait()
        for index in range(1, request.sampling_params.n):
            await context.write(gateway_pb2.GenerateResponse(index=index, finish=generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_STOP)))
        await context.write(
            gateway_pb2.GenerateResponse(
                request_id=request.request_id,
                finish=generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_STOP, matched_token_id=2),
                usage=generation_pb2.Usage(prompt_tokens=30, completion_tokens=len(WORDS), total_tokens=30 + len(WORDS), cached_tokens=16),
            )
        )

    async def GetStatus(self, request: gateway_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> gateway_pb2.GetStatusResponse:
        paths = [
            kv_pb2.KvPath(prefill_instance="prefill-0", transport="inline", bytes_per_s=1.234e9, reason="shared_memory: decode is on another host"),
            kv_pb2.KvPath(prefill_instance="prefill-1", reason="UNAVAILABLE nobody is there"),
        ]
        load = load_pb2.LoadReport(ready=True, num_blocks=100, num_free_blocks=93, model="smollm2", num_requests_running=2)
        return gateway_pb2.GetStatusResponse(
            version="0.1.0",
            num_requests_running=2,
            instances=[
                gateway_pb2.InstanceStatus(name="prefill-0", role=gateway_pb2.INSTANCE_ROLE_PREFILL, available=True, load=load),
                gateway_pb2.InstanceStatus(name="decode-0", role=gateway_pb2.INSTANCE_ROLE_DECODE, available=False, reason="unreachable"),
                gateway_pb2.InstanceStatus(
                    name="decode-1", role=gateway_pb2.INSTANCE_ROLE_DECODE, available=True, load=load_pb2.LoadReport(ready=True, kv_paths=paths)
                ),
            ],
        )


class ScriptedDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Calls prefill and ends, so that a trace spans three services."""

    def __init__(self, prefill: str) -> None:
        self._prefill = prefill

    async def Generate(self, request: decode_pb2.DecodeServiceGenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await _call("tandem.v1.PrefillService/Prefill", self._prefill, prefill_pb2.PrefillRequest())
        with span("decode") as handle:
            handle.add_event(FIRST_TOKEN)


class ScriptedPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Takes one request and computes nothing."""

    async def Prefill(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async for _ in request_iterator:  # a client that still sends when the RPC ends sees INTERNAL
            with span("prefill"):
                pass


async def _call(method: str, target: str, request: Any) -> None:
    with outgoing(method) as (metadata, _):
        async with control_channel(target) as channel:
            stub: Any = decode_pb2_grpc.DecodeServiceStub(channel) if "Decode" in method else prefill_pb2_grpc.PrefillServiceStub(channel)
            call = stub.Generate(request, metadata=metadata) if "Decode" in method else stub.Prefill(iter([request]), metadata=metadata)
            async for _ in call:
                pass


def add_gateway(server: RpcServer, script: str = "", decode: str = "") -> ScriptedGateway:
    """Puts a scripted gateway on a server."""
    gateway = ScriptedGateway(script, decode)
    server.add(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, gateway, "tandem.v1.GatewayService")
    return gateway


async def _serve(instance: str, port: int, script: str, prefill: str, decode: str) -> int:
    configure_tracing(instance.split("-")[0], instance)
    server = RpcServer(instance, port=port)
    add_gateway(server, script, _address(decode))
    server.add(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, ScriptedPrefill(), "tandem.v1.PrefillService")
    server.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, ScriptedDecode(_address(prefill)), "tandem.v1.DecodeService")
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, (lambda: None) if script == "stubborn" else stopped.set)
    await server.start()
    server.set_ready(script not in ("unready", "die"), script)
    print(f"scripted {instance} has process id {os.getpid()}", flush=True)
    if script == "die":
        return 3
    await stopped.wait()
    print("draining", flush=True)
    await server.drain(1.0)
    await flush()
    return 0


def _address(instances: str) -> str:
    return instances.split(",")[0].partition("=")[2]


def main() -> int:
    """Takes the flags of the real services."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--instance", required=True)
    parser.add_argument("--port", type=int, required=True)
    for optional in ("--script", "--prefill", "--decode"):
        parser.add_argument(optional, default="")
    arguments, _ = parser.parse_known_args()
    return asyncio.run(_serve(arguments.instance, arguments.port, arguments.script, arguments.prefill, arguments.decode))


if __name__ == "__main__":
    sys.exit(main())
