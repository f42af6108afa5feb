"""`python -m checks.handover_bench_worker {prefill,decode} CORE ARGUMENT...`: the real worker over an engine whose steps take no time.

Scheduler, pool, services and transports are those of `tandem prefill` and `tandem decode`; only the model is not there.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future

import worker.service
from checks.handover_bench_machine import pin
from checks.handover_bench_pool import LLAMA_8B
from decode_svc.__main__ import main as decode_main
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.facts import ModelFacts
from engine.kv_cache import HostKvCache
from engine.sampling_params import SampledToken
from engine.step import StepPlan, StepResult
from prefill_svc.__main__ import main as prefill_main

VOCAB_SIZE = 1000
_TOKEN = SampledToken(5)
_MAINS = {"prefill": prefill_main, "decode": decode_main}


class InstantDevice:
    """Implements engine.step.Device: computes nothing, always samples the same token."""

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """See Device."""
        future: Future[StepResult] = Future()
        future.set_result(StepResult([(_TOKEN,) * len(chunk.samples) for chunk in plan.chunks], {}))
        return future

    def close(self) -> None:
        """See Device."""


def build_instant_engine(config: EngineConfig) -> AsyncEngine:
    """An engine with a pool of blocks of 2 MiB."""
    assert config.num_blocks is not None
    sys.setswitchinterval(0.0005)  # as a worker with a model does
    kv_cache = HostKvCache(LLAMA_8B, config.num_blocks)
    facts = ModelFacts("instant", VOCAB_SIZE, frozenset(), config.num_blocks * LLAMA_8B.block_size, LLAMA_8B)
    return AsyncEngine(Engine(facts, config.limits, InstantDevice(), num_blocks=config.num_blocks, generations=kv_cache.generations), kv_cache)


def main() -> int:
    """Runs the worker; returns the exit code."""
    role, core, *arguments = sys.argv[1:]
    pin([int(core)])
    worker.service._build_engine = build_instant_engine
    return _MAINS[role](arguments)


if __name__ == "__main__":
    raise SystemExit(main())
