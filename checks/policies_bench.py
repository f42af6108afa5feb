"""`make bench-policies`: what each scheduling policy trades, under one mixed load of short chats and long prompts.

One process computes prompts and generates (decode without a prefill pool), so that a long prompt and running streams want the same steps: there policies differ
most. The same requests at the same times for every policy, each on a fresh worker. How many there are is what this machine can do: a short closed loop of each
kind comes first, and the load is to take three quarters of the worker's time, a third of that with long prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from bench.arrivals import Closed, Constant, Poisson
from bench.metrics import measured
from bench.plan import Loop, Plan
from bench.prompts import Vocabulary
from bench.record import Outcome, Record
from bench.runner import Measured, RunLimits, Runner
from bench.schedule import Extent, Fit, plan_of
from bench.tandem_target import TandemTarget
from bench.workloads import Workload, workload_of
from checks.documents import rows_as_markdown
from checks.handover_bench_report import updated
from checks.verdict import Check, quick
from cli.stack import Stack, StackOptions
from engine.policies import POLICIES

_TARGET = "bench-policies"
_READY_S, _DRAIN_S = 120.0, 30.0
_WORKER = "--num-threads=1 --max-num-seqs=32 --max-model-len=8192 --num-blocks=2600 --no-enable-prefix-caching"


@dataclass(frozen=True, slots=True)
class Load:
    """Short chats at chance, and a long prompt now and then."""

    duration_s: float
    short_per_s: float
    long_per_s: float
    long_tokens: int


_SHORT, _LONG_OUTPUT = workload_of("uniform", input_len="32:160", output_len="24:48"), "16"
_SHORT_SHARE, _LONG_SHARE = 0.5, 0.25
"""Of the worker's time."""
_CALIBRATED_STREAMS = 8


@dataclass(frozen=True, slots=True)
class Traded:
    """Of one policy, seconds: TTFT of short and long requests, and every gap of the short ones."""

    policy: str
    short_ttft: Sequence[float]
    long_ttft: Sequence[float]
    itl: Sequence[float]
    num_failed: int

    def row(self) -> dict[str, float | str]:
        """Percentiles in milliseconds."""
        parts: Mapping[str, Sequence[float]] = {"short_ttft": self.short_ttft, "long_ttft": self.long_ttft, "itl": self.itl}
        figures = {f"{name}_p{percent}_ms": _percentile_ms(values, percent) for name, values in parts.items() for percent in (50, 99)}
        return {"policy": self.policy, "short": len(self.short_ttft), "long": len(self.long_ttft), "failed": self.num_failed, **figures}


def _percentile_ms(values: Sequence[float], percent: int) -> float:
    return round(float(np.percentile(values, percent)) * 1e3, 1) if values else float("nan")


def _long(tokens: int) -> Workload:
    return workload_of("fixed", input_len=str(tokens), output_len=_LONG_OUTPUT)


def plan(load: Load, vocab_size: int, seed: int = 1) -> Plan:
    """Both kinds by their times; what is long is told by its prompt."""
    fit, extent = Fit(Vocabulary(vocab_size)), Extent(duration_s=load.duration_s)
    short = plan_of(_SHORT, Poisson(load.short_per_s), extent, fit, seed)
    long = plan_of(_long(load.long_tokens), Constant(load.long_per_s), extent, fit, seed + 1)
    requests = sorted((*short.requests, *long.requests), key=lambda request: request.due_s or 0.0)
    words = f"{short.workload} at {short.arrivals}, {long.workload} at {long.arrivals}"
    return Plan(tuple(replace(each, index=index) for index, each in enumerate(requests)), Loop.OPEN, words, "both", 1.0, seed)


async def calibrate(model: Path, duration_s: float, long_tokens: int, vocab_size: int, log: TextIO) -> Load:
    """The load that this machine's worker has time for. Raises RuntimeError when a request fails."""
    fit = Fit(Vocabulary(vocab_size))
    rates = []
    for workload, streams, count in ((_SHORT, _CALIBRATED_STREAMS, 4 * _CALIBRATED_STREAMS), (_long(long_tokens), 1, 3)):
        records = (await _run(model, "fifo", plan_of(workload, Closed(streams), Extent(num_requests=count), fit, seed=7), log)).records
        if any(record.outcome is not Outcome.OK for record in records):
            raise RuntimeError("a request of the calibration failed")
        rates.append(len(records) / (max(record.arrived[-1].at_s for record in records) - min(record.scheduled_s for record in records)))
    return Load(duration_s, _SHORT_SHARE * rates[0], _LONG_SHARE * rates[1], long_tokens)


async def _run(model: Path, policy: str, load: Plan, log: TextIO) -> Measured:
    """On a worker of its own."""
    options = StackOptions(model, num_prefill=0, decode_args=f"{_WORKER} --scheduling-policy={policy}", gateway_args="--max-prefill-backlog-tokens=100000")
    stack = Stack(options, lambda name, line: print(f"{name:<10}| {line}", file=log, flush=True))
    target = TandemTarget(stack.addresses["gateway"])
    try:
        await stack.start()
        await stack.wait_until_ready(_READY_S)
        await target.open()
        return await Runner(load, target, RunLimits(drain_s=_READY_S, ttft_limit_s=1.0)).run()
    finally:
        await target.close()
        await stack.drain(_DRAIN_S)


async def measure(model: Path, policy: str, load: Plan, long_tokens: int, log: TextIO) -> tuple[Traded, tuple[str, ...]]:
    """One policy, and why its run is void."""
    found = await _run(model, policy, load, log)
    return _traded(policy, measured(found.records), long_tokens), found.void


def _traded(policy: str, records: Sequence[Record], long_tokens: int) -> Traded:
    good = [record for record in records if record.outcome is Outcome.OK]
    short = [record for record in good if record.num_prompt_tokens != long_tokens]
    long = [record for record in good if record.num_prompt_tokens == long_tokens]
    gaps = [other.at_s - one.at_s for record in short for one, other in zip(record.arrived, record.arrived[1:], strict=False)]
    return Traded(policy, [_ttft(record) for record in short], [_ttft(record) for record in long], gaps, len(records) - len(good))


def _ttft(record: Record) -> float:
    assert record.first_token_s is not None
    return record.first_token_s - record.scheduled_s


def show(rows: Sequence[Traded]) -> Table:
    """For a terminal."""
    heads = ("policy", "short", "TTFT p50", "p99 ms", "long", "TTFT p50", "p99 ms", "ITL p50", "p99 ms")
    table = Table(*heads, title="short chats and long prompts in one worker")
    for each in rows:
        row = each.row()
        names = ("short", "short_ttft_p50_ms", "short_ttft_p99_ms", "long", "long_ttft_p50_ms", "long_ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
        table.add_row(each.policy, *(f"{row[name]:,.0f}" for name in names))
    return table


def main() -> None:
    """Runs the benchmark, or shows the last run's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model directory")
    parser.add_argument("--update", type=Path, help="put the last run's table into a document, between its bench-policies marks, and end")
    arguments = parser.parse_args()
    if arguments.update is not None:
        details = json.loads(Path("out", f"{_TARGET}.json").read_text())
        text = f"{details['load']}:\n\n{rows_as_markdown(details['policies'], code='policy')}"
        arguments.update.write_text(updated(arguments.update.read_text(), text, _TARGET))
        return
    if arguments.model is None:
        parser.error("--model is needed")
    model = arguments.model
    check = Check(_TARGET)
    duration_s, long_tokens = (3.0, 700) if quick() else (50.0, 4000)
    names = ("fifo", "shortest") if quick() else tuple(POLICIES)
    check.begin(f"one mixed load under {', '.join(names)}", seconds=420, quick_seconds=48)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    out, rows, void = Path("out"), list[Traded](), list[str]()
    out.mkdir(exist_ok=True)
    with (out / f"{_TARGET}-calibration.log").open("w") as log:
        try:
            load = uvloop.run(calibrate(model, duration_s, long_tokens, vocab_size, log))
        except RuntimeError as error:
            check.void(str(error))
    planned = plan(load, vocab_size)
    print(f"  {len(planned.requests)} requests in {load.duration_s:g} s: {planned.workload}", flush=True)
    for name in names:
        print(f"  {name}", flush=True)
        with (out / f"{_TARGET}-{name}.log").open("w") as log:
            traded, reasons = uvloop.run(measure(model, name, planned, load.long_tokens, log))
        rows.append(traded)
        void += [f"{name}: {reason}" for reason in reasons]
        check.goal(not traded.num_failed, f"{traded.num_failed} requests failed under {name}")
    check.details |= {"load": planned.workload, "policies": [each.row() for each in rows]}
    Console().print(show(rows))
    if void:
        check.void("; ".join(void))
    check.end({f"{each.policy.replace('-', '_')}_{kind}": each.row()[f"{kind}_p99_ms"] for each in rows for kind in ("short_ttft", "long_ttft", "itl")})


if __name__ == "__main__":
    main()
