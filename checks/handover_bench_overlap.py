"""How much of a long prompt's hand-over is hidden behind its computation: real workers, a real model, one core each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checks.handover_bench_process import pin_process
from checks.handover_bench_served import REAL, Served
from checks.prompts import mixed_prompts
from checks.verdict import quick
from tandem.v1 import decode_pb2

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


async def measure(served: Served, model: Path, cores: Sequence[int]) -> Overlap:
    """Prompts one behind the other, prefill on the first core and decode on the second one. Raises RuntimeError."""
    num_tokens, count = (1024, 1) if quick() else (4096, 2)
    for pid, core in zip((served.real_pid, served.decode_pid), cores, strict=False):
        pin_process(pid, [core])
    try:
        tokens = mixed_prompts(model, 1, longest=num_tokens, seed=4)[0][1:]
        await served.generate("warm-up", [19, *tokens[:64]], REAL, max_tokens=3, timeout_s=_TIMEOUT_S)
        reports = [await served.generate(f"overlap-{index}", [index + 20, *tokens], REAL, max_tokens=3, timeout_s=_TIMEOUT_S) for index in range(count)]
    finally:
        for pid in (served.real_pid, served.decode_pid):
            pin_process(pid, cores)
    return Overlap(served.transport, num_tokens, -(-num_tokens // _CHUNK_TOKENS), reports)
