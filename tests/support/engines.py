"""Engines for tests that need no model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from engine import calls
from engine.async_engine import AsyncEngine
from engine.engine import Engine
from engine.events import Event, Failed, Finished, PromptLogprobs, Tokens
from engine.facts import ModelFacts
from engine.kv_cache import HostKvCache
from engine.limits import EngineLimits
from engine.sampling_params import SampledToken
from engine.sequence import SequenceSpec
from tests.support.fake_device import FAKE_LAYOUT, VOCAB_SIZE, FakeDevice

FAKE_EOS = 7


@dataclass(frozen=True, slots=True)
class FakeParts:
    """What a fake engine is made of."""

    engine: Engine
    device: FakeDevice
    kv_cache: HostKvCache


def fake_parts(
    *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 128, limits: EngineLimits | None = None, fingerprint: str = "fake"
) -> FakeParts:
    """A synchronous engine over a fake device."""
    layout = replace(FAKE_LAYOUT, block_size=block_size, model_fingerprint=fingerprint)
    kv_cache = HostKvCache(layout, num_blocks, probe_bytes=4096)
    device = FakeDevice(kv_cache)
    facts = ModelFacts("fake", VOCAB_SIZE, frozenset({FAKE_EOS}), max_model_len, layout)
    limits = limits or EngineLimits(max_num_seqs=8, max_num_batched_tokens=32, max_prefill_tokens_per_step=8, reserve_output_tokens=8)
    return FakeParts(Engine(facts, limits, device, num_blocks=num_blocks, generations=kv_cache.generations), device, kv_cache)


def fake_engine(**options: object) -> tuple[AsyncEngine, FakeDevice]:
    """An asyncio engine over a fake device, not yet started; options as of `fake_parts`."""
    parts = fake_parts(**options)  # type: ignore[arg-type]
    return AsyncEngine(parts.engine, parts.kv_cache), parts.device


@asynccontextmanager
async def running_fake_engine(**options: object) -> AsyncIterator[tuple[AsyncEngine, FakeDevice]]:
    """A started fake engine that is stopped at the end."""
    engine, device = fake_engine(**options)
    await engine.start()
    try:
        yield engine, device
    finally:
        if device.gate is not None:
            device.gate.set()
        await engine.stop()
        engine.kv_cache.close()  # a descriptor for each of hundreds of engines is more than a process may have


async def collect(engine: AsyncEngine, spec: SequenceSpec) -> list[Event]:
    """Runs a sequence to its end and returns its events."""
    stream = engine.submit(spec)
    events: list[Event] = []
    try:
        while not has_ended(events, spec.sampling.n):
            events.extend(await stream.get())
    finally:
        engine.release(spec.seq_id)
    return events


def has_ended(events: list[Event], n: int = 1) -> bool:
    """Whether the last event of a sequence of n samples is among these."""
    return any(isinstance(event, Failed) for event in events) or sum(isinstance(event, Finished) for event in events) == n


def token_ids(events: list[Event], index: int = 0) -> list[int]:
    """All sampled tokens of one sample among events."""
    return [token.token_id for token in sampled_tokens(events, index)]


def sampled_tokens(events: list[Event], index: int = 0) -> list[SampledToken]:
    """The same with their log probabilities; positions have no gap."""
    runs = [event for event in events if isinstance(event, Tokens) and event.index == index]
    assert all(later.position == run.position + len(run.tokens) for run, later in pairwise(runs)), "positions have a gap"
    return [token for run in runs for token in run.tokens]


def prompt_logprobs(events: list[Event]) -> list[SampledToken]:
    """All log probabilities of prompt tokens among events."""
    return [token for event in events if isinstance(event, PromptLogprobs) for token in event.logprobs]


def run_alone(parts: FakeParts, spec: SequenceSpec) -> list[int]:
    """Drives a synchronous engine with one sequence to its end; the output tokens of its first sample."""
    return token_ids(events_alone(parts, spec))


def events_alone(parts: FakeParts, spec: SequenceSpec) -> list[Event]:
    """The same, with all events."""
    parts.engine.handle(calls.Submit(spec))
    events: list[Event] = []
    while parts.engine.has_work:
        parts.engine.step()
        events.extend(event for seq_id, event in parts.engine.take_events() if seq_id == spec.seq_id)
    return events
