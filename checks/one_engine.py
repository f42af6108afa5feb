"""Greedy completions by one engine of this process, set up in the ways that must not matter."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.async_engine import AsyncEngine
from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.events import Failed, Finished, Scheduled, Tokens
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceKind, SequenceSpec


@dataclass(frozen=True, slots=True)
class Prompt:
    """Greedy, with as many tokens as asked, whatever they are."""

    token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to run the same prompts."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of EngineConfig."""
    at_once: bool = True
    """All prompts together, or one after the other."""
    rounds: int = 1
    """How often all are run; the last answers count."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What came out, and what the engine did for it."""

    outputs: list[list[int]]
    num_preemptions: int
    num_cached_tokens: int


async def run_engine(model: Path, prompts: Sequence[Prompt], setup: Setup) -> EngineRun:
    """Runs all prompts in a new engine, in float32."""
    options = {"num_threads": 2, "max_num_batched_tokens": 512, "max_num_seqs": 32, "num_blocks": 512, "enable_prefix_caching": False, **setup.options}
    engine = build_engine(EngineConfig(model, dtype="float32", **options))
    await engine.start()
    try:
        for number in range(setup.rounds):
            found = await _run_all(engine, prompts, number, at_once=setup.at_once)
        return EngineRun([tokens for tokens, _ in found], (await engine.report()).num_preemptions, sum(cached for _, cached in found))
    finally:
        await engine.stop()


async def _run_all(engine: AsyncEngine, prompts: Sequence[Prompt], number: int, *, at_once: bool) -> list[tuple[list[int], int]]:
    running = [_complete(engine, f"{number}-{place}", prompt) for place, prompt in enumerate(prompts)]
    return list(await asyncio.gather(*running)) if at_once else [await one for one in running]


async def _complete(engine: AsyncEngine, seq_id: str, prompt: Prompt) -> tuple[list[int], int]:
    """Tokens, and prompt tokens found in the prefix cache."""
    params = SamplingParams(max_tokens=prompt.num_output_tokens, temperature=0.0, ignore_eos=True)
    stream = engine.submit(SequenceSpec(seq_id, prompt.token_ids, params, SequenceKind.LOCAL))
    tokens: list[int] = []
    num_cached = 0
    try:
        while True:
            for event in await stream.get():
                match event:
                    case Scheduled():
                        num_cached = event.cached_tokens
                    case Tokens():
                        tokens.extend(token.token_id for token in event.tokens)
                    case Finished():
                        return tokens, num_cached
                    case Failed():
                        raise EngineError(f"a prompt of {len(prompt.token_ids)} tokens failed: {event.error}")
                    case _:
                        pass
    finally:
        engine.release(seq_id)
