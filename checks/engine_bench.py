"""`make bench-engine`: how the cost of a step and of a prompt grows, and what part of the machine's limit that is.

One process with the device alone, no scheduler and no service: SmolLM2 in bfloat16, all cores. A step over a batch is one token of each of so many sequences,
with so much context of their own, greedy, the sampling included. A prompt is computed in the chunks that the engine cuts by default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from checks.engine_bench_device import PREFILL_CHUNK, Bench, Startup, measure_startup
from checks.engine_bench_plot import plot
from checks.engine_bench_report import markdown, tables
from checks.handover_bench_report import updated
from checks.peers_floor import Limits, Size
from checks.verdict import Check, quick
from engine.kernels.isa import ISAS, Isa, name_of, runs_here

_TARGET = "bench-engine"
_LIMITS_TIMEOUT_S = 60.0
_MIN_OF_READ, _MIN_OF_MATMUL = 0.5, 0.5


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured."""

    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]
    pool_gib: float
    rounds: int


FULL = Grid((1, 2, 4, 8, 16, 32, 64, 128), (128, 512, 1024, 2048, 4096, 8191), (128, 256, 512, 1024, 2048, 4096, 8192), 3.0, 7)
QUICK = Grid((1, 8), (128, 1024), (128, 512), 0.5, 3)


def limits(threads: int) -> Limits:
    """Of the machine, by a process of its own, so that its threads are gone afterwards. Raises OSError or subprocess.SubprocessError."""
    command = [sys.executable, "-m", "checks.peers_limits", "--threads", str(threads)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=_LIMITS_TIMEOUT_S, check=True).stdout
    return Limits(**json.loads(found.splitlines()[-1]))


def steps(bench: Bench, size: Size, grid: Grid, machine: Limits) -> Iterator[dict[str, float]]:
    """One row for each batch and context that the pool has blocks for."""
    for batch in grid.batches:
        for context in grid.contexts:
            if batch * bench.blocks_of(context + 1) > bench.num_blocks:
                continue
            seconds = statistics.median(bench.step_s(batch, context) for _ in range(grid.rounds))
            num_bytes = size.step_bytes(batch, context)
            memory_s, compute_s = num_bytes / machine.read_gb_per_s / 1e9, size.step_operations(batch, context) / machine.matmul_gflop_per_s / 1e9
            yield {
                "batch": batch,
                "context": context,
                "ms": round(seconds * 1e3, 2),
                "gb_per_s": round(num_bytes / seconds / 1e9, 1),
                "of_limit": round(max(memory_s, compute_s) / seconds, 3),
            }


def prompts(bench: Bench, size: Size, grid: Grid, machine: Limits) -> Iterator[dict[str, float]]:
    """One row for each length."""
    for length in grid.prompts:
        seconds = statistics.median(bench.prompt_s(length) for _ in range(max(grid.rounds // 2, 1)))
        operations = size.prompt_operations(length)
        rate = operations / seconds / 1e9
        yield {"tokens": length, "ms": round(seconds * 1e3, 1), "gflop_per_s": round(rate), "of_limit": round(rate / machine.matmul_gflop_per_s, 3)}


def compared(model: Path, threads: int, rounds: int) -> Iterator[dict[str, float | str]]:
    """The same few shapes by code for other instructions, and by transformers' module."""
    isas: list[Isa | None] = [isa for isa in ISAS if isa != "native" and runs_here(isa)]
    for isa in (*isas, None):
        with Bench.opened(model, threads, 0.25, isa=isa, native=isa is not None) as bench:
            one, eight = (statistics.median(bench.step_s(batch, 300) for _ in range(rounds)) for batch in (1, 8))
            name = "transformers' module" if isa is None else f"native, {isa}"
            row = {"step_1_ms": one, "step_8_ms": eight, "prompt_256_ms": bench.prompt_s(256)}
            yield {"forward": name, "batch_invariant": str(bench.batch_invariant), **{key: round(value * 1e3, 1) for key, value in row.items()}}


def main() -> None:
    """Runs the benchmark, or shows the last run's figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model directory")
    parser.add_argument("--update", type=Path, help="put the last run's tables into a document, between its bench-engine marks, and end")
    arguments = parser.parse_args()
    out = Path("out")
    if arguments.update is not None:
        details = json.loads((out / f"{_TARGET}.json").read_text())
        arguments.update.write_text(updated(arguments.update.read_text(), markdown(details), _TARGET))
        return
    if arguments.model is None:
        parser.error("--model is needed")
    run(arguments.model, out)


def run(model: Path, out: Path) -> None:
    """Measures, and ends the process."""
    check, grid, threads = Check(_TARGET), QUICK if quick() else FULL, os.cpu_count() or 1
    check.begin("the cost of steps and prompts on the device alone", seconds=200, quick_seconds=48)
    try:
        machine = limits(threads)
    except (OSError, subprocess.SubprocessError) as error:
        check.void(f"the machine's limits cannot be measured: {error}")
    print(f"  {threads} threads read {machine.read_gb_per_s} GB/s and multiply {machine.matmul_gflop_per_s:,.0f} GFLOP/s in bfloat16", flush=True)
    size = Size.of(model)
    startup: Startup = measure_startup(model, threads, cold=not quick())
    with Bench.opened(model, threads, grid.pool_gib) as bench:
        stepped, prompted = list(steps(bench, size, grid, machine)), list(prompts(bench, size, grid, machine))
        packed = bench.weight_bytes
    others = [] if quick() else list(compared(model, threads, grid.rounds))
    details = {
        "machine": {"num_cores": threads, "isa": name_of("native"), "read_gb_per_s": machine.read_gb_per_s, "matmul_gflop_per_s": machine.matmul_gflop_per_s},
        "model": {"name": model.name, "packed_mb": round(packed / 1e6, 1), "kv_bytes_a_token": size.kv_bytes, "prefill_chunk": PREFILL_CHUNK},
        "startup": startup.row(),
        "steps": stepped,
        "prompts": prompted,
        "compared": others,
    }
    check.details |= details
    for table in tables(details):
        Console(width=140).print(table)
    print(f"  {plot(details, out / f'{_TARGET}.png')}", flush=True)
    small = next(row for row in stepped if (row["batch"], row["context"]) == (1, grid.contexts[0]))
    best = max(row["of_limit"] for row in prompted)
    check.goal(small["of_limit"] >= _MIN_OF_READ, f"one stream at {_MIN_OF_READ} of the machine's limit, got {small['of_limit']}")
    check.goal(best >= _MIN_OF_MATMUL, f"prompts at {_MIN_OF_MATMUL} of the machine's matrix products, got {best}")
    check.end({"step_1_ms": small["ms"], "of_read_limit": small["of_limit"], "of_matmul_limit": best})


if __name__ == "__main__":
    main()
