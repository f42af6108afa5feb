"""What a hand-over of a paired instance takes beside its bytes: two real workers whose engines compute nothing, cut into segments by their own spans."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from checks import handover_bench_bare as bare
from checks.handover_bench_process import free_port, running_service, transport_flags
from checks.verdict import quick
from cli.service_process import ServiceSpec
from rpc.channels import control_channel
from tandem.v1 import decode_pb2, decode_pb2_grpc, generation_pb2
from telemetry import spans
from telemetry.receiver import OtlpReceiver, ReceivedSpan

PROMPT_TOKENS = 64
"""Four blocks of 2 MiB."""
RESERVE, ASK, COMPUTE, READY, COPY, CONFIRM, STEP = "reserve", "ask", "compute", "ready notice", "copy", "confirm and commit", "first decode step"
SEGMENTS: Mapping[str, str] = {
    RESERVE: "decode opens the Prefill RPC, and its engine takes the blocks",
    ASK: "from there until prefill's engine has the prompt",
    COMPUTE: "prefill's engine: a turn of its scheduler, and a step that takes no time",
    READY: "from the end of the chunk's step to the start of the read",
    COPY: "the blocks are read",
    CONFIRM: "from the last byte: Copied, the end that confirms, commit",
    STEP: "from commit to decode's own first token sent, by an engine whose step takes no time",
}
"""One behind the other, without a gap."""
CONTROL = (RESERVE, ASK, READY, CONFIRM)
"""What counts against the budget."""
_DECODE, _PREFILL = "tandem.v1.DecodeService/Generate", "tandem.v1.PrefillService/Prefill"
_NEEDED = {("SERVER", _DECODE), ("CLIENT", _PREFILL), ("SERVER", _PREFILL)} | {
    ("INTERNAL", name) for name in (spans.RESERVE, spans.PREFILL_QUEUE, spans.PREFILL, spans.KV_HOLD, spans.KV_TRANSFER, spans.DECODE)
}
_TIMEOUT_S = 30.0
_WARM_UP = 10
_WORKER = ("--model=.", "--num-blocks=256", "--no-enable-prefix-caching", "--metrics-port=-1", "--host=127.0.0.1")


@dataclass(frozen=True, slots=True)
class ControlPath:
    """Segments of each request, in seconds."""

    transport: str
    requests: Sequence[Mapping[str, float]]
    bare_s: float
    """A bare gRPC conversation of the same messages between the same cores: the floor."""

    def median_ms(self, segment: str) -> float:
        """Of one segment."""
        return statistics.median(request[segment] for request in self.requests) * 1e3

    @property
    def control_ms(self) -> float:
        """The median request's sum of what is no byte and no compute."""
        return statistics.median(sum(request[segment] for segment in CONTROL) for request in self.requests) * 1e3

    @property
    def own_ms(self) -> float:
        """What of it is not the conversation's floor."""
        return self.control_ms - self.bare_s * 1e3

    def row(self) -> dict[str, object]:
        """For the file."""
        medians = {f"{segment}_ms": round(self.median_ms(segment), 3) for segment in SEGMENTS}
        return {
            "transport": self.transport,
            "requests": len(self.requests),
            **medians,
            "control_ms": round(self.control_ms, 3),
            "bare_ms": round(self.bare_s * 1e3, 3),
        }


async def measure(transport: str, cores: Sequence[int], socket_dir: Path, log: Path) -> ControlPath:
    """Requests one behind the other, through a decode worker on the second core and a prefill worker on the first. Raises RuntimeError."""
    count = 40 if quick() else 200
    before_s = await bare.measure((cores[0], cores[1]), count)
    async with OtlpReceiver() as receiver, _running(transport, cores, socket_dir, receiver.endpoint, log) as stub:
        for index in range(_WARM_UP + count):
            await _complete(stub, f"control-{index}", transport)
        complete = await receiver.wait_for(lambda found: sum(map(_is_whole, _traces(found))) >= _WARM_UP + count)
        traces = [trace for trace in _traces(complete) if _is_whole(trace)]
    bare_s = (before_s + await bare.measure((cores[0], cores[1]), count)) / 2
    return ControlPath(transport, [segments(trace) for trace in traces[_WARM_UP:]], bare_s)


@asynccontextmanager
async def _running(transport: str, cores: Sequence[int], socket_dir: Path, otlp: str, log: Path) -> AsyncIterator[decode_pb2_grpc.DecodeServiceStub]:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": otlp,
        "OTEL_SDK_DISABLED": "false",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_TRACES_SAMPLER": "parentbased_always_on",
    }
    prefill_port, decode_port = free_port(), free_port()
    flags = transport_flags(transport, socket_dir)
    wanted = (
        ("prefill", "PrefillService", prefill_port, flags),
        ("decode", "DecodeService", decode_port, (*flags, f"--prefill=p=127.0.0.1:{prefill_port}", f"--kv-transports={transport}")),
    )
    async with AsyncExitStack() as stack:
        for (name, service, port, arguments), core in zip(wanted, cores, strict=False):
            command = (name, str(core), *_WORKER, f"--port={port}", *arguments)
            await stack.enter_async_context(
                running_service(ServiceSpec(name, "checks.handover_bench_worker", f"tandem.v1.{service}", port, command, environment), log)
            )
        channel = await stack.enter_async_context(control_channel(f"127.0.0.1:{decode_port}"))
        yield decode_pb2_grpc.DecodeServiceStub(channel)


async def _complete(stub: decode_pb2_grpc.DecodeServiceStub, request_id: str, transport: str) -> None:
    sampling = generation_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, seed=1)
    request = decode_pb2.DecodeServiceGenerateRequest(
        request_id=request_id, prompt_token_ids=[7] * PROMPT_TOKENS, sampling_params=sampling, prefill_instance="p"
    )
    taken = ""
    async for response in stub.Generate(request, timeout=_TIMEOUT_S):
        if response.HasField("handover"):
            taken = response.handover.transport
    if taken != transport:
        raise RuntimeError(f"a request was handed over by {taken or 'no transport'}, not by {transport}")


def _traces(received: Sequence[ReceivedSpan]) -> list[list[ReceivedSpan]]:
    """By request, oldest first."""
    by_id: dict[str, list[ReceivedSpan]] = {}
    for span in received:
        by_id.setdefault(span.trace_id, []).append(span)
    return sorted(by_id.values(), key=lambda trace: min(span.start_ns for span in trace))


def _is_whole(trace: Sequence[ReceivedSpan]) -> bool:
    return {(span.kind, span.name) for span in trace} >= _NEEDED


def segments(trace: Sequence[ReceivedSpan]) -> dict[str, float]:
    """One request cut by its spans' timestamps; seconds."""
    by_name = {(span.kind, span.name): span for span in trace}
    call, queue, reserve = by_name["CLIENT", _PREFILL], by_name["INTERNAL", spans.PREFILL_QUEUE], by_name["INTERNAL", spans.RESERVE]
    transfer, decode = by_name["INTERNAL", spans.KV_TRANSFER], by_name["INTERNAL", spans.DECODE]
    chunk_ns = max(event.at_ns for event in by_name["INTERNAL", spans.PREFILL].events if event.name == spans.CHUNK)
    wire_s = transfer.attributes[spans.KV_WIRE_S]
    assert isinstance(wire_s, float)
    return {
        RESERVE: (reserve.end_ns - call.start_ns) / 1e9,
        ASK: (queue.start_ns - reserve.end_ns) / 1e9,
        COMPUTE: (chunk_ns - queue.start_ns) / 1e9,
        READY: (transfer.start_ns - chunk_ns) / 1e9,
        COPY: wire_s,
        CONFIRM: (call.end_ns - transfer.end_ns) / 1e9,
        STEP: (decode.end_ns - call.end_ns) / 1e9,
    }
