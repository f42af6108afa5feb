"""What running streams feel of a hand-over of 512 MiB: a real decode worker with a real model, and KV that a prefill instance has at once.

Streams run all the time. A trial lasts a second, with one hand-over in it or none, in the order A B B A. The blocks are reserved by the worker, read
by its own reader, and given back unconfirmed, so that no step has more to do afterwards.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from checks.handover_bench_machine import MIB, process_cpu_s
from checks.handover_bench_served import INSTANT, MAX_MODEL_LEN, NUM_STREAMS, Served, request_of
from checks.prompts import mixed_prompts
from checks.verdict import quick
from tandem.v1 import decode_pb2_grpc

_WARM_TOKENS = 8
_TRIAL_S, _TIMEOUT_S, _SETTLE_S = 1.0, 600.0, 0.1


@dataclass(frozen=True, slots=True)
class Trial:
    """A second of running streams; seconds."""

    during_s: float
    """Mean gap between tokens that overlaps the hand-over, or, without one, a piece of the second that is as long."""
    second_s: float
    """Mean gap of the whole second."""
    handover_s: float
    """From the announcement to Copied; 0 without one."""
    decode_cores: float
    """Cores that the decode worker had in this second."""
    prefill_cores: float


@dataclass
class Tpot:
    """Trials by one transport."""

    transport: str
    handover_mib: float
    control: list[Trial] = field(default_factory=list)
    with_handover: list[Trial] = field(default_factory=list)

    def ratio(self, name: str) -> float:
        """Mean of the trials with a hand-over to that of those without."""
        return _mean(self.with_handover, name) / _mean(self.control, name)

    def row(self) -> dict[str, object]:
        """For the file."""

        def mean(trials: Sequence[Trial], name: str, scale: float = 1.0) -> float:
            return round(_mean(trials, name) * scale, 2)

        return {
            "transport": self.transport,
            "streams": NUM_STREAMS,
            "handover_mib": self.handover_mib,
            "pairs": len(self.control),
            "handover_ms": mean(self.with_handover, "handover_s", 1e3),
            "control_tpot_ms": mean(self.control, "during_s", 1e3),
            "tpot_during_ms": mean(self.with_handover, "during_s", 1e3),
            "ratio_during": round(self.ratio("during_s"), 3),
            "control_tpot_of_second_ms": mean(self.control, "second_s", 1e3),
            "tpot_of_second_ms": mean(self.with_handover, "second_s", 1e3),
            "ratio_of_second": round(self.ratio("second_s"), 3),
            "decode_cores_control": mean(self.control, "decode_cores"),
            "decode_cores": mean(self.with_handover, "decode_cores"),
            "prefill_cores": mean(self.with_handover, "prefill_cores"),
        }


def _mean(trials: Sequence[Trial], name: str) -> float:
    return float(statistics.mean(getattr(one, name) for one in trials))


class Stream:
    """One running request: when its tokens came, as of time.monotonic_ns()."""

    def __init__(self) -> None:
        self.times_ns: list[int] = []
        self.is_warm = asyncio.Event()

    async def run(self, stub: decode_pb2_grpc.DecodeServiceStub, prompt: Sequence[int], request_id: str) -> None:
        """Runs until it is cancelled, or has as many tokens as a sequence may have."""
        request = request_of(request_id, prompt, "", max_tokens=MAX_MODEL_LEN - len(prompt) - 1)
        async for response in stub.Generate(request, timeout=_TIMEOUT_S):
            if response.token_ids:
                self.times_ns.append(time.monotonic_ns())
                if len(self.times_ns) == _WARM_TOKENS:
                    self.is_warm.set()

    def gaps_ns(self, start_ns: int, end_ns: int) -> list[int]:
        """Gaps that lie in part or wholly within."""
        pairs = zip(self.times_ns, self.times_ns[1:], strict=False)
        return [later - before for before, later in pairs if later > start_ns and before < end_ns]


class Decode:
    """The decode worker with its streams."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._streams = [Stream() for _ in range(NUM_STREAMS)]
        self._num_handed_over = 0
        self._handover_s = 0.0

    @asynccontextmanager
    async def streaming(self, model: Path) -> AsyncIterator[None]:
        """Streams that run until the end of the block. Raises what ends one of them before."""
        prompts = mixed_prompts(model, 1, longest=64 * NUM_STREAMS, seed=6)[0]
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(stream.run(self._served.decode, prompts[64 * index : 64 * (index + 1)], f"stream-{index}"))
                for index, stream in enumerate(self._streams)
            ]
            async with asyncio.timeout(_TIMEOUT_S):
                await asyncio.gather(*(stream.is_warm.wait() for stream in self._streams))
            await self._hand_over()  # the first one finds everything cold
            yield
            for task in running:
                task.cancel()

    async def trial(self, *, hand_over: bool) -> Trial:
        """One second."""
        await asyncio.sleep(_SETTLE_S)
        started_ns, cpu = time.monotonic_ns(), self._cpu_s()
        if hand_over:
            window = await self._hand_over()
            self._handover_s = (window[1] - window[0]) / 1e9
        else:
            first = started_ns + int(_SETTLE_S * 1e9)
            window = first, first + int(self._handover_s * 1e9)
        await asyncio.sleep(max(0.0, _TRIAL_S - (time.monotonic_ns() - started_ns) / 1e9))
        ended_ns, later = time.monotonic_ns(), self._cpu_s()
        elapsed_s = (ended_ns - started_ns) / 1e9
        await asyncio.sleep(_SETTLE_S)  # for the gap that is open
        return Trial(
            self._mean_gap_s(*window),
            self._mean_gap_s(started_ns, ended_ns),
            self._handover_s if hand_over else 0.0,
            (later[0] - cpu[0]) / elapsed_s,
            (later[1] - cpu[1]) / elapsed_s,
        )

    def _mean_gap_s(self, start_ns: int, end_ns: int) -> float:
        return statistics.mean(gap for stream in self._streams for gap in stream.gaps_ns(start_ns, end_ns)) / 1e9

    def _cpu_s(self) -> tuple[float, float]:
        return process_cpu_s(self._served.decode_pid), process_cpu_s(self._served.instant.pid)

    async def _hand_over(self) -> tuple[int, int]:
        """All prompts at once; returns when the first was announced and when the last was copied. They are cancelled then."""
        self._num_handed_over += 1
        calls = []
        try:
            for index, num_tokens in enumerate(self._served.prompt_tokens):
                prompt = [self._num_handed_over + 100, index, *[7] * (num_tokens - 2)]
                request = request_of(f"{self._num_handed_over}-{index}", prompt, INSTANT, max_tokens=2)
                calls.append(self._served.decode.Generate(request, timeout=_TIMEOUT_S))
            copied = [await self._served.instant.copied(_TIMEOUT_S) for _ in calls]
            return min(one["announced_ns"] for one in copied), max(one["copied_ns"] for one in copied)
        finally:
            for call in calls:
                call.cancel()


async def measure(served: Served, model: Path) -> Tpot:
    """All trials."""
    pairs = 3 if quick() else 12
    result = Tpot(served.transport, round(served.handover_bytes / MIB, 1))
    decode = Decode(served)
    async with decode.streaming(model):
        for pair in range(pairs):
            for hand_over in (False, True) if pair % 2 == 0 else (True, False):
                (result.with_handover if hand_over else result.control).append(await decode.trial(hand_over=hand_over))
    return result
