"""`make check-trace`: the segments of a request's trace add up to what its client waited, and a delay shows in the segment where it was injected."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from checks.client import Completion, complete
from checks.cluster import running_cluster
from checks.prompts import mixed_prompts
from checks.verdict import Check, quick
from cli.stack import StackOptions
from tandem.v1 import gateway_pb2, generation_pb2
from telemetry import spans
from telemetry.receiver import OtlpReceiver, ReceivedSpan

_DELAY_S = 0.05
_TIMEOUT_S = 60.0
_PROMPT_TOKENS = 100
_GATEWAY, _DECODE, _PREFILL = "tandem.v1.GatewayService/Generate", "tandem.v1.DecodeService/Generate", "tandem.v1.PrefillService/Prefill"
_WHOLE = {("INTERNAL", name) for name in spans.SEGMENTS} | {(kind, name) for name in (_DECODE, _PREFILL) for kind in ("CLIENT", "SERVER")}
_UNTIL_FIRST_TOKEN = (spans.TOKENIZE, spans.QUEUE, spans.ROUTE, spans.RESERVE, spans.PREFILL_QUEUE, spans.PREFILL, spans.DECODE)
_HOPS = ("client to gateway", "gateway to decode", "decode to prefill", "prefill to decode", "decode to client")
_MAX_MEDIAN_S, _MAX_S = 0.002, 0.010
_FELT, _UNFELT = 0.8 * _DELAY_S, 0.4 * _DELAY_S


@dataclass(frozen=True, slots=True)
class Waterfall:
    """One request's trace, cut into segments of two timestamps each; seconds."""

    ttft_s: float
    segments: Mapping[str, float]
    """All segments of design 8, `decode` up to the first token, `kv.hold` from the end of the copy."""
    hops: Mapping[str, float]
    """From a sender's timestamp to a receiver's: the RPCs between the segments."""

    @property
    def gap_s(self) -> float:
        """What the client waited and no segment or hop covers."""
        return self.ttft_s - sum(self.segments[name] for name in _UNTIL_FIRST_TOKEN) - sum(self.hops.values())


def waterfall(completion: Completion, trace: tuple[ReceivedSpan, ...]) -> Waterfall:
    """Raises KeyError when a span is missing."""
    internal = {span.name: span for span in trace if span.kind == "INTERNAL"}
    server = {span.name: span for span in trace if span.kind == "SERVER"}
    client = {span.name: span for span in trace if span.kind == "CLIENT"}
    decode, transfer = internal[spans.DECODE], internal[spans.KV_TRANSFER]
    first_token_ns = next(event.at_ns for event in decode.events if event.name == spans.FIRST_TOKEN)
    lasted = {name: internal[name].duration_s for name in spans.SEGMENTS}
    lasted[spans.DECODE] = (first_token_ns - decode.start_ns) / 1e9
    lasted[spans.KV_HOLD] = (internal[spans.KV_HOLD].end_ns - max(internal[spans.KV_HOLD].start_ns, transfer.end_ns)) / 1e9
    ends = (
        (completion.started_ns, server[_GATEWAY].start_ns),
        (client[_DECODE].start_ns, server[_DECODE].start_ns),
        (client[_PREFILL].start_ns, server[_PREFILL].start_ns),
        (internal[spans.PREFILL].end_ns, decode.start_ns),
        (first_token_ns, completion.first_message_ns),
    )
    hops = {name: (end - start) / 1e9 for name, (start, end) in zip(_HOPS, ends, strict=True)}
    return Waterfall((completion.first_message_ns - completion.started_ns) / 1e9, lasted, hops)


async def measure(model: Path, count: int, delayed: str | None) -> list[Waterfall]:
    """Runs `count` requests one after the other, with 50 ms injected into one segment or none."""
    async with OtlpReceiver() as receiver:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_SDK_DISABLED": "false",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_TRACES_SAMPLER": "parentbased_always_on",
            "TANDEM_FAILPOINTS": f"{delayed}=delay:{_DELAY_S}" if delayed else "",
        }
        worker = "--max-model-len=1024 --num-threads=1 --kv-cache-memory=200000000"
        options = StackOptions(model, prefill_args=worker, decode_args=worker, environment=environment)
        async with running_cluster(options, Path(f"out/check-trace-{delayed or 'control'}.log")) as cluster:
            found = []
            for index, prompt in enumerate(_prompts(model, count)):
                sampling = generation_pb2.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
                request_id = f"trace-{delayed or 'control'}-{index}"
                request = gateway_pb2.GenerateRequest(request_id=request_id, token_ids=generation_pb2.TokenIds(ids=prompt), sampling_params=sampling)
                completion = await complete(cluster.gateway, request, timeout_s=_TIMEOUT_S)
                if completion.code is not grpc.StatusCode.OK:
                    raise RuntimeError(f"{request_id} ended {completion.code.name}: {completion.details}")
                found.append(waterfall(completion, await _trace_of(receiver, request_id)))
            return found[1:]  # the first request finds everything cold


def _prompts(model: Path, count: int) -> list[list[int]]:
    """One chunk each, so that each delay is felt once, and no two with a common prefix."""
    source = mixed_prompts(model, 1, longest=_PROMPT_TOKENS * (count + 1), seed=1)[0]
    return [[index + 20, *source[_PROMPT_TOKENS * index : _PROMPT_TOKENS * (index + 1)]] for index in range(count + 1)]


async def _trace_of(receiver: OtlpReceiver, request_id: str) -> tuple[ReceivedSpan, ...]:
    def root(received: tuple[ReceivedSpan, ...]) -> ReceivedSpan | None:
        return next((span for span in received if span.name == _GATEWAY and span.attributes.get(spans.REQUEST_ID) == request_id), None)

    def whole(received: tuple[ReceivedSpan, ...]) -> bool:
        found = root(received)
        return {(span.kind, span.name) for span in received if found and span.trace_id == found.trace_id} >= _WHOLE

    received = await receiver.wait_for(whole)
    found = root(received)
    assert found is not None
    return receiver.trace(found.trace_id)


def judge_sums(check: Check, control: list[Waterfall]) -> tuple[float, float]:
    """The segments against the client's clock: median and largest gap in seconds."""
    gaps = [abs(each.gap_s) for each in control]
    median, largest = statistics.median(gaps), max(gaps)
    check.details["control"] = [{"ttft_s": each.ttft_s, "gap_s": each.gap_s, **each.segments, **each.hops} for each in control]
    check.goal(median <= _MAX_MEDIAN_S, f"the median gap is {median * 1e3:.2f} ms")
    check.goal(largest <= _MAX_S, f"the largest gap is {largest * 1e3:.2f} ms")
    return median, largest


def judge_delay(check: Check, delayed: str, control: list[Waterfall], slowed: list[Waterfall]) -> bool:
    """A delay must show in its own segment and in no other."""

    def least(of: list[Waterfall], name: str) -> float:
        # An injected delay is in every request; what the machine adds is not.
        return min(each.segments[name] for each in of)

    grown = {name: least(slowed, name) - least(control, name) for name in spans.SEGMENTS}
    check.details[f"delay in {delayed}"] = grown
    print(f"  {delayed:<14} " + "  ".join(f"{name} {growth * 1e3:+.1f}" for name, growth in grown.items()) + "  (ms)", flush=True)
    right = grown[delayed] >= _FELT and all(abs(growth) <= _UNFELT for name, growth in grown.items() if name != delayed)
    check.goal(right, f"the delay in {delayed} does not show there alone")
    return right


def main() -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    model = parser.parse_args().model
    check = Check("check-trace")
    check.begin("traces of three processes against the client's clock, and a delay injected into each segment in turn", seconds=160, quick_seconds=50)
    control = asyncio.run(measure(model, 6 if quick() else 20, None))
    median, largest = judge_sums(check, control)
    delays = (spans.RESERVE, spans.PREFILL) if quick() else spans.SEGMENTS
    right = sum(judge_delay(check, name, control, asyncio.run(measure(model, 3 if quick() else 9, name))) for name in delays)
    check.end(
        {
            "requests": len(control),
            "gap_median_ms": round(median * 1e3, 3),
            "gap_max_ms": round(largest * 1e3, 3),
            "delays": len(delays),
            "shown_in_own_segment_only": right,
        }
    )


if __name__ == "__main__":
    main()
