"""How much of a long prompt's hand-over is hidden behind its computation: real workers, a real model, one core each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checks.cluster import running_cluster
from checks.handover_bench_process import pin_process
from checks.prompts import mixed_prompts
from checks.verdict import quick
from cli.stack import StackOptions
from tandem.v1 import decode_pb2, decode_pb2_grpc, generation_pb2

_TIMEOUT_S = 120.0
_CHUNK_TOKENS = 512
"""As a worker has it by default."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Hand-overs of prompts of one length by one transport."""

    transport: str
    num_tokens: int
    num_chunks: int
    reports: Sequence[decode_pb2.HandoverReport]

    @property
    def hidden_share(self) -> float:
        """Of the time in which bytes were on their way, the part before the prompt was computed; the median."""
        return statistics.median(report.hidden_s / report.transfer_s for report in self.reports)

    @property
    def exposed_ms(self) -> float:
        """From the end of compute to the confirmed copy; the median."""
        return statistics.median(report.exposed_s for report in self.reports) * 1e3

    def row(self) -> dict[str, object]:
        """For the file."""
        return {
            "transport": self.transport,
            "prompt_tokens": self.num_tokens,
            "chunks": self.num_chunks,
            "prompts": len(self.reports),
            "kv_mib": round(self.reports[0].kv_bytes / (1 << 20), 1),
            "transfer_ms": round(statistics.median(report.transfer_s for report in self.reports) * 1e3, 2),
            "hidden_share": round(self.hidden_share, 3),
            "exposed_ms": round(self.exposed_ms, 2),
        }


async def measure(model: Path, transport: str, cores: Sequence[int], log: Path) -> Overlap:
    """Prompts one behind the other. Raises RuntimeError when one was not handed over by this transport."""
    num_tokens, count = (1024, 1) if quick() else (4096, 2)
    worker = "--num-threads=1 --num-blocks=600 --max-model-len=8192 --metrics-port=-1"
    options = StackOptions(model, prefill_args=worker, decode_args=f"{worker} --kv-transports={transport}", gateway_args="--metrics-port=-1")
    async with running_cluster(options, log) as cluster:
        for name, core in zip(("prefill-0", "decode-0"), cores, strict=False):
            pin_process(cluster.stack.pids[name], [core])
        await _hand_over(cluster.decode, mixed_prompts(model, 1, longest=64, seed=3)[0], "warm-up")
        tokens = mixed_prompts(model, 1, longest=num_tokens, seed=4)[0][1:]
        reports = [await _hand_over(cluster.decode, [index + 20, *tokens], f"overlap-{index}") for index in range(count)]
    for report in reports:
        if report.transport != transport:
            raise RuntimeError(f"a prompt was handed over by {report.transport or 'no transport'}, not by {transport}")
    return Overlap(transport, num_tokens, -(-num_tokens // _CHUNK_TOKENS), reports)


async def _hand_over(stub: decode_pb2_grpc.DecodeServiceStub, prompt: Sequence[int], request_id: str) -> decode_pb2.HandoverReport:
    sampling = generation_pb2.SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, seed=1)
    request = decode_pb2.DecodeServiceGenerateRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=sampling, prefill_instance="prefill-0")
    found = decode_pb2.HandoverReport()
    async for response in stub.Generate(request, timeout=_TIMEOUT_S):
        if response.HasField("handover"):
            found.CopyFrom(response.handover)
    return found
