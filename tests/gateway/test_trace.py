from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc

from gateway.served_model import ServedModel
from rpc.failpoints import configure_failpoints
from tandem.v1 import gateway_pb2_grpc
from telemetry.receiver import OtlpReceiver, ReceivedSpan
from tests.gateway.fake_decode import FakeDecode, load_report, tokens
from tests.gateway.house import WAIT_S, ask, house


async def test_segments_are_children_of_the_server_span_and_a_delay_shows_in_its_own(models: dict[str, ServedModel], receiver: OtlpReceiver) -> None:
    names = ("tokenize", "queue", "route")
    async with house(models["smollm2"], tokens([5, 6]), num_prefills=1) as h:
        for slow in names:
            configure_failpoints(f"{slow}=delay:0.05")
            try:
                _, trailers = await h.generate(ask("x", temperature=0.5, seed=2**64 - 1))
            finally:
                configure_failpoints("")
            await h.until(lambda id_=trailers["tandem-request-id"]: len(of_request(receiver, id_)) >= 5)  # type: ignore[misc]
            spans = {span.name: span for span in of_request(receiver, trailers["tandem-request-id"])}
            server = spans["tandem.v1.GatewayService/Generate"]
            for name in names:
                assert spans[name].parent_id == server.span_id
                assert (spans[name].end_ns - spans[name].start_ns > 50e6) == (name == slow)
            assert spans["tandem.v1.DecodeService/Generate"].trace_id == server.trace_id
            attributes = server.attributes
            assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "m"
            assert (attributes["gen_ai.usage.output_tokens"], attributes["tandem.path"], attributes["tandem.decode_instance"]) == (2, "handover", "d0")
            assert [event.name for event in server.events] == ["first_token"]


def of_request(receiver: OtlpReceiver, request_id: str) -> list[ReceivedSpan]:
    roots = [span.trace_id for span in receiver.spans if span.attributes.get("tandem.request_id") == request_id]
    return [
        span for span in receiver.spans if roots and span.trace_id == roots[0] and not (span.name.endswith("DecodeService/Generate") and span.kind == "SERVER")
    ]


async def test_the_process_serves_drains_and_exits_with_0(models: dict[str, ServedModel], model_dirs: dict[str, Path]) -> None:
    model = models["smollm2"]
    decode = FakeDecode(load_report(model.vocab_size, sorted(model.eos_token_ids)), tokens([5, 6]))
    port = await decode.server.start()
    arguments = ["--model", str(model_dirs["smollm2"]), "--decode", f"d0=127.0.0.1:{port}", "--metrics-port", "-1"]
    environment = {**os.environ, "PYTHONPATH": "protos:."}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments, cwd=Path(__file__).parents[2], env=environment, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            log, own_port, ready = "", 0, False
            while not ready:
                line = (await process.stderr.readline()).decode()
                assert line, log
                log += line
                own_port = int(line.rpartition(":")[2]) if "gateway listens on" in line else own_port
                ready = "gateway is ready" in line
            async with grpc.aio.insecure_channel(f"127.0.0.1:{own_port}") as channel:
                messages = [message async for message in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(ask("x", model="smollm2"), timeout=WAIT_S)]
            assert messages[-1].usage.completion_tokens == 2
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            rest = (await process.stderr.read()).decode()
            assert await process.wait() == 0, log + rest
            assert "Traceback" not in log + rest
            assert time.monotonic() - began < 10
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await decode.server.drain(0.01)
