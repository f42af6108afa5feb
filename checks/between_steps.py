"""`make bench-between-steps`: what lies between two forwards, with a fake one that takes no time.

Everything else is real: the engine's thread, its scheduler and block pool, the device's packing and sampling, delivery to an event loop, and a reader for each
stream there. Logits are prepared, over a vocabulary of 49,152. What is held against the goal is the whole time from step to step, the loop's share in it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import uvloop
from rich.console import Console
from rich.table import Table

from checks.documents import rows_as_markdown
from checks.handover_bench_report import updated
from checks.tiny_models import write_tiny_model
from checks.verdict import Check, quick
from engine.async_engine import AsyncEngine
from engine.attention import PackedBatch
from engine.build import build_torch_engine_parts
from engine.config import EngineConfig
from engine.engine import Engine
from engine.events import Finished
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from engine.torch_device import TorchDevice

_TARGET = "bench-between-steps"
_VOCAB_SIZE, _PROMPT_TOKENS = 49_152, 64
_MAX_MS = 1.0
_TIMEOUT_S = 300.0
_NUM_PROFILED = 14
SAMPLING = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
    "temperature": SamplingParams(max_tokens=1, temperature=0.8, seed=1, ignore_eos=True),
    "top_p, top_k": SamplingParams(max_tokens=1, temperature=0.8, top_p=0.95, top_k=50, seed=1, ignore_eos=True),
}


class FakeForward:
    """Gives hidden states of zeros, and the same logits every time, at once."""

    name, attention_backend, batch_invariant = "native", "native", True

    def __init__(self, max_rows: int) -> None:
        self._hidden = torch.zeros(max_rows, 1)
        self._logits = torch.from_numpy(np.random.default_rng(0).standard_normal((max_rows, _VOCAB_SIZE), np.float32) * 2.0)

    def hidden_states(self, token_ids: npt.NDArray[np.int32], batch: PackedBatch, rows: npt.NDArray[np.int32]) -> torch.Tensor:
        """See Forward."""
        return self._hidden[: len(rows)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Forward."""
        return self._logits[: len(hidden)]


@dataclass
class Clock:
    """Seconds of each call of some functions, by name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """From here on `owner.method` is timed."""
        called: Callable[..., Any] = getattr(owner, method)
        times = self.seconds.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return called(*args, **kwargs)
            finally:
                times.append(time.perf_counter() - started)

        setattr(owner, method, timed)


@dataclass(frozen=True, slots=True)
class Found:
    """Of one kind of sampling, milliseconds a step."""

    sampling: str
    batch: int
    median: float
    p99: float
    parts: dict[str, float]
    """Medians of what is inside; the loop's part runs beside the others, as far as the GIL lets it."""

    def row(self) -> dict[str, object]:
        """For a file."""
        parts = {name: round(value, 3) for name, value in self.parts.items()}
        return {"sampling": self.sampling, "batch": self.batch, "median_ms": round(self.median, 3), "p99_ms": round(self.p99, 3), **parts}


def engine_of(model: Path, batch: int, num_tokens: int) -> tuple[AsyncEngine, TorchDevice]:
    """A real engine and its device, whose forward is a fake."""
    num_blocks = batch * (-(-(_PROMPT_TOKENS + num_tokens) // 16) + 2)
    config = EngineConfig(model, num_threads=1, num_blocks=num_blocks, max_num_seqs=batch, enable_prefix_caching=False)
    facts, kv_cache, device = build_torch_engine_parts(config)
    device._forward = FakeForward(batch)
    return AsyncEngine(Engine(facts, config.limits, device, num_blocks=kv_cache.num_blocks), kv_cache), device


async def read(engine: AsyncEngine, seq_id: str, sampling: SamplingParams, num_tokens: int) -> None:
    """One client's stream, to its end."""
    params = replace(sampling, max_tokens=num_tokens)
    stream = engine.submit(SequenceSpec(seq_id, tuple(range(3, 3 + _PROMPT_TOKENS)), params, SequenceKind.LOCAL))
    try:
        while True:
            for event in await stream.get():
                if isinstance(event, Finished):
                    return
    finally:
        engine.release(seq_id)


async def measure(model: Path, name: str, batch: int, num_tokens: int, profile: cProfile.Profile | None = None) -> Found:
    """`batch` streams of `num_tokens` each, side by side; a profile is of the engine's thread."""
    engine, device = engine_of(model, batch, num_tokens)
    clock, launched = Clock(), list[float]()
    inner = engine._engine
    clock.watch(inner.scheduler, "schedule", "schedule")
    clock.watch(device, "_hidden_states", "build")
    clock.watch(device, "_sample", "sample")
    clock.watch(inner, "complete", "take")
    clock.watch(engine, "_deliver", "deliver")
    launch = device.launch

    def noted(plan: Any) -> Any:
        if len(plan.chunks) == batch and all(len(chunk.token_ids) == 1 for chunk in plan.chunks):
            launched.append(time.perf_counter())
        return launch(plan)

    device.launch = noted  # type: ignore[method-assign]
    if profile is not None:
        turn = engine._turn
        engine._turn = lambda: profile.runcall(turn)  # type: ignore[method-assign]
    await engine.start()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await asyncio.gather(*(read(engine, str(index), SAMPLING[name], num_tokens) for index in range(batch)))
    finally:
        await engine.stop()
    steps = np.diff(launched)[10:] * 1e3
    parts = {part: statistics.median(times[20:]) * 1e3 for part, times in clock.seconds.items()}
    return Found(name, batch, float(np.median(steps)), float(np.percentile(steps, 99)), parts)


def show(found: list[Found]) -> Table:
    """For a terminal."""
    parts = list(found[0].parts)
    table = Table("sampling", "streams", "step to step", "p99", *parts, title="Between two forwards, ms a step", title_justify="left")
    for each in found:
        table.add_row(each.sampling, str(each.batch), f"{each.median:.2f}", f"{each.p99:.2f}", *(f"{each.parts[part]:.2f}" for part in parts))
    return table


def profiled(profile: cProfile.Profile, num_steps: int) -> list[dict[str, object]]:
    """The functions of the engine's thread that take the most time themselves, microseconds a step with the profiler's own cost in them."""
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    rows = sorted(stats.items(), key=lambda item: -item[1][2])[:_NUM_PROFILED]
    named = [(f"{Path(file).name}:{line} {function}" if line else function, calls, own) for (file, line, function), (_, calls, own, _, _) in rows]
    return [{"function": name, "calls": round(calls / num_steps, 1), "own_us": round(own / num_steps * 1e6, 1)} for name, calls, own in named]


def main() -> None:
    """Runs the benchmark, or shows the last run's figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", type=Path, help="put the last run's tables into a document, between its bench-between-steps marks, and end")
    update = parser.parse_args().update
    if update is not None:
        details = json.loads(Path("out", f"{_TARGET}.json").read_text())
        update.write_text(
            updated(update.read_text(), f"{rows_as_markdown(details['steps'])}\n\n{rows_as_markdown(details['profile'], code='function')}", _TARGET)
        )
        return
    check, num_tokens = Check(_TARGET), 300 if quick() else 2200
    check.begin("schedule, build, sample and deliver with a model that takes no time", seconds=60, quick_seconds=25)
    sys.setswitchinterval(0.0005)  # as a worker does
    with tempfile.TemporaryDirectory() as scratch:
        model = write_tiny_model(Path(scratch) / "model", "llama", vocab_size=_VOCAB_SIZE, max_position_embeddings=4096, hidden_size=96, intermediate_size=96)
        cells = [("greedy", 64), ("greedy", 8), ("greedy", 1), ("temperature", 64), ("top_p, top_k", 64)]
        found = [uvloop.run(measure(model, name, batch, num_tokens if name == "greedy" else num_tokens // 8)) for name, batch in cells]
        profile = cProfile.Profile()
        uvloop.run(measure(model, "greedy", 64, num_tokens // 4, profile))
    check.details |= {"steps": [each.row() for each in found], "profile": profiled(profile, num_tokens // 4)}
    console = Console(width=140)
    console.print(show(found))
    table = Table("function", "calls a step", "own us a step", title="The engine's thread, 64 streams, greedy, under cProfile", title_justify="left")
    for row in profiled(profile, num_tokens // 4):
        table.add_row(str(row["function"]), str(row["calls"]), str(row["own_us"]))
    console.print(table)
    check.goal(found[0].median < _MAX_MS, f"under {_MAX_MS} ms from step to step with 64 streams, got {found[0].median:.2f} ms")
    check.end({"greedy_64_ms": round(found[0].median, 3), "greedy_64_p99_ms": round(found[0].p99, 3), "sampled_64_ms": round(found[-1].median, 3)})


if __name__ == "__main__":
    main()
