"""`make check-cancel`: clients that leave in every phase, and how long both pools take until everything is given back."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from checks.cluster import Cluster, num_held, running_cluster
from checks.prompts import mixed_prompts
from checks.verdict import Check, quick
from cli.stack import StackOptions
from tandem.v1 import gateway_pb2, generation_pb2
from telemetry import spans
from telemetry.receiver import OtlpReceiver, ReceivedSpan

_PHASES = (spans.QUEUE, spans.PREFILL_QUEUE, spans.PREFILL, spans.KV_TRANSFER, spans.DECODE)
_GATEWAY = "tandem.v1.GatewayService/Generate"
_WAVE, _ACTIVE, _PROMPT_TOKENS, _CHUNK_TOKENS = 8, 6, 320, 64
_GRACE_S = 0.250
_BOUND_S, _MAX_RUN_S, _EXPORT_S = 20.0, 1500.0, 1.0


@dataclass
class Tally:
    """What all waves found."""

    given_back_s: list[float] = field(default_factory=list)
    """One entry per cancel: until nothing was held any more in either pool and the gateway."""
    phases: Counter[str] = field(default_factory=Counter)
    """Cancels by the phase that the servers' own spans name."""
    still_held: int = 0

    @property
    def num_cancels(self) -> int:
        """Requests that were cancelled before their end."""
        return len(self.given_back_s)

    def enough(self, num_cancels: int, per_phase: int) -> bool:
        """Every phase has been met often enough."""
        return self.num_cancels >= num_cancels and all(self.phases[phase] >= per_phase for phase in _PHASES)

    def when_to_cancel_s(self) -> tuple[float, float]:
        """The range for the next wave's moment: late while the late phases are the rarest ones."""
        late = min(self.phases[phase] for phase in (spans.KV_TRANSFER, spans.DECODE))
        early = min(self.phases[phase] for phase in (spans.QUEUE, spans.PREFILL_QUEUE, spans.PREFILL))
        return (1.5, 4.0) if late <= early else (0.05, 2.0)

    def p99_s(self) -> float:
        """The 99th percentile of the time until everything was given back."""
        return sorted(self.given_back_s)[max(0, int(len(self.given_back_s) * 0.99) - 1)]


class Waves:
    """Sends requests at random moments and cancels all of them at one moment."""

    def __init__(self, cluster: Cluster, receiver: OtlpReceiver, source: list[int]) -> None:
        self._cluster = cluster
        self._receiver = receiver
        self._source = source
        self._random = random.Random(5)
        self._num_sent = 0

    def _request(self, max_tokens: int = 400) -> gateway_pb2.GenerateRequest:
        self._num_sent += 1
        first = self._random.randrange(len(self._source) - _PROMPT_TOKENS)
        ids = [self._num_sent % 40_000 + 100, *self._source[first : first + _PROMPT_TOKENS - 1]]
        sampling = generation_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return gateway_pb2.GenerateRequest(request_id=f"cancel-{self._num_sent}", token_ids=generation_pb2.TokenIds(ids=ids), sampling_params=sampling)

    async def idle_step_s(self) -> float:
        """The longest step of a prompt that is alone, from its chunks' timestamps; the bound that a cancel is measured against."""
        request = self._request(max_tokens=2)
        async for _ in self._cluster.gateway.Generate(request, timeout=60.0):
            pass
        [prefill] = [span for span in await self._trace_of(request.request_id, {spans.PREFILL}) if span.name == spans.PREFILL]
        ends = [prefill.start_ns, *(event.at_ns for event in prefill.events if event.name == spans.CHUNK)]
        return max(after - before for before, after in itertools.pairwise(ends)) / 1e9

    async def run(self, tally: Tally, cancel_after_s: float) -> None:
        """One wave."""
        calls: dict[str, Any] = {}
        readers = [asyncio.create_task(self._send(calls, self._random.uniform(0, cancel_after_s * 0.6))) for _ in range(_WAVE)]
        await asyncio.sleep(cancel_after_s)
        cancelled = [request_id for request_id, call in calls.items() if call.cancel()]
        cancelled_at = time.monotonic()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        held = await self._until_given_back(cancelled_at)
        tally.still_held += held
        tally.given_back_s.extend([time.monotonic() - cancelled_at] * len(cancelled))
        for request_id in cancelled:
            tally.phases[await self._phase_of(request_id)] += 1

    async def _send(self, calls: dict[str, Any], after_s: float) -> None:
        await asyncio.sleep(after_s)
        request = self._request()
        call = calls[request.request_id] = self._cluster.gateway.Generate(request, timeout=120.0)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for _ in call:
                pass

    async def _until_given_back(self, since: float) -> int:
        """Waits until nothing is held anywhere; what still is after the bound."""
        while True:
            status = await self._cluster.gateway.GetStatus(gateway_pb2.GetStatusRequest(), timeout=10.0)
            held: int = sum(num_held(report) for report in (await self._cluster.memory()).values())
            held += status.num_requests_running + status.num_requests_waiting
            if held == 0 or time.monotonic() - since > _BOUND_S:
                return held
            await asyncio.sleep(0.004)

    async def _phase_of(self, request_id: str) -> str:
        trace = await self._trace_of(request_id, {_GATEWAY})
        cut = {span.name for span in trace if span.attributes.get(spans.CANCELLED) or spans.ERROR_TYPE in span.attributes}
        if spans.KV_HOLD in cut:
            return spans.KV_TRANSFER  # after PrefillDone and before its RPC's end
        return next((phase for phase in _PHASES if phase in cut), "other")

    async def _trace_of(self, request_id: str, names: set[str]) -> tuple[ReceivedSpan, ...]:
        """The trace, as soon as every RPC that a CLIENT span called has its SERVER span; one that was cancelled on its way never gets one."""

        def root(received: tuple[ReceivedSpan, ...]) -> ReceivedSpan | None:
            return next((span for span in received if span.name == _GATEWAY and span.attributes.get(spans.REQUEST_ID) == request_id), None)

        def whole(received: tuple[ReceivedSpan, ...]) -> bool:
            trace = [span for span in received if span.trace_id == trace_id]
            served = {span.name for span in trace if span.kind == "SERVER"}
            return {span.name for span in trace if span.kind == "CLIENT"} <= served and names <= {span.name for span in trace}

        found = root(await self._receiver.wait_for(lambda received: root(received) is not None))
        assert found is not None
        trace_id = found.trace_id
        with contextlib.suppress(TimeoutError):
            await self._receiver.wait_for(whole, timeout_s=_EXPORT_S)
        return self._receiver.trace(trace_id)


async def run(check: Check, model: Path) -> tuple[Tally, float, int]:
    """Waves until every phase has been met often enough."""
    num_cancels, per_phase = (40, 2) if quick() else (500, 60)
    async with OtlpReceiver(max_spans=2000) as receiver:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_SDK_DISABLED": "false",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "OTEL_TRACES_SAMPLER": "parentbased_always_on",
            # Without it a copy on this machine is over in milliseconds, and hardly a client would leave during one.
            "TANDEM_FAILPOINTS": f"{spans.KV_TRANSFER}=delay:0.3",
        }
        worker = f"--dtype=bfloat16 --max-model-len=1024 --num-threads=1 --max-prefill-tokens-per-step={_CHUNK_TOKENS} --kv-cache-memory=300000000"
        options = StackOptions(model, prefill_args=worker, decode_args=worker, gateway_args=f"--max-active-requests={_ACTIVE}", environment=environment)
        async with running_cluster(options, Path("out/check-cancel.log")) as cluster:
            waves = Waves(cluster, receiver, mixed_prompts(model, 1, longest=6000, seed=3)[0])
            await waves.idle_step_s()  # finds everything cold
            step_s = await waves.idle_step_s()
            tally, moments, began, num_waves = Tally(), random.Random(6), time.monotonic(), 0
            while not tally.enough(num_cancels, per_phase):
                if time.monotonic() - began > _MAX_RUN_S:
                    check.void(f"phases met: {dict(tally.phases)}, too few after {_MAX_RUN_S:g} s")
                await waves.run(tally, moments.uniform(*tally.when_to_cancel_s()))
                num_waves += 1
                if num_waves % 10 == 0:
                    print(f"  {time.monotonic() - began:.0f} s: {tally.num_cancels} cancels, {dict(tally.phases)}", flush=True)
            memory = await cluster.memory()
            return tally, step_s, sum(report.num_late_steps for report in memory.values())


def main() -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    model = parser.parse_args().model
    check = Check("check-cancel")
    check.begin("clients that leave in every phase of a request", seconds=300, quick_seconds=45)
    tally, step_s, late_steps = asyncio.run(run(check, model))
    p99_s = tally.p99_s()
    check.details |= {"given_back_s": sorted(tally.given_back_s), "phases": dict(tally.phases), "step_s": step_s}
    check.goal(tally.still_held == 0, f"{tally.still_held} things are still held")
    check.goal(late_steps == 0, f"{late_steps} sequences were computed after their release was posted")
    check.goal(
        p99_s <= step_s + _GRACE_S, f"p99 until everything is given back is {p99_s * 1e3:.0f} ms, one step and 250 ms are {(step_s + _GRACE_S) * 1e3:.0f} ms"
    )
    phases = {f"in_{phase.replace('.', '_')}": tally.phases[phase] for phase in _PHASES}
    check.end(
        {
            "cancels": tally.num_cancels,
            **phases,
            "p99_ms": round(p99_s * 1e3),
            "step_ms": round(step_s * 1e3),
            "held": tally.still_held,
            "late_steps": late_steps,
        }
    )


if __name__ == "__main__":
    main()
