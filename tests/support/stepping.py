"""Engines driven step by step, without a thread."""

from __future__ import annotations

import itertools

from engine import calls
from engine.events import Event
from engine.limits import EngineLimits
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from tests.support.engines import FakeParts, events_alone, fake_parts, token_ids

_ids = itertools.count()


def a_spec(prompt: list[int] | range, max_tokens: int = 6, kind: SequenceKind = SequenceKind.LOCAL, **options: object) -> SequenceSpec:
    sampling = options.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return SequenceSpec(f"s{next(_ids)}", tuple(prompt), sampling, kind, **options)  # type: ignore[arg-type]


def expected(prompt: list[int] | range, max_tokens: int = 6, *, sampling: SamplingParams | None = None, index: int = 0) -> list[int]:
    """Tokens of a fresh engine that computes this one sample alone, unbatched, with nothing cached."""
    return token_ids(expected_events(prompt, max_tokens, sampling=sampling, index=index))


def expected_events(prompt: list[int] | range, max_tokens: int = 6, *, sampling: SamplingParams | None = None, index: int = 0) -> list[Event]:
    """All events of it."""
    limits = EngineLimits(max_num_batched_tokens=256, max_prefill_tokens_per_step=256, enable_prefix_caching=False)
    spec = a_spec(prompt, max_tokens, sampling=sampling.of_sample(index) if sampling else None)
    parts = fake_parts(limits=limits)
    try:
        return events_alone(parts, spec)
    finally:
        parts.kv_cache.close()


def late_parts(**options: object) -> FakeParts:
    """As `fake_parts`, over a device that computes a launched step, and touches KV, only when the test says so."""
    parts = fake_parts(**options)  # type: ignore[arg-type]
    parts.device.late = True
    return parts


def submit(parts: FakeParts, spec: SequenceSpec) -> SequenceSpec:
    """Queues it."""
    parts.engine.handle(calls.Submit(spec))
    return spec


def release(parts: FakeParts, *seq_ids: str) -> None:
    """As their owners' `finally`."""
    for seq_id in seq_ids:
        parts.engine.handle(calls.Release(seq_id, 0))


def finish_step(parts: FakeParts) -> None:
    """The late device computes what was launched, and the engine takes the result."""
    parts.device.finish()
    parts.engine.complete()


def events_of(parts: FakeParts) -> dict[str, list[Event]]:
    """What happened since the last look; events by sequence."""
    events: dict[str, list[Event]] = {}
    for seq_id, event in parts.engine.take_events():
        events.setdefault(seq_id, []).append(event)
    return events


def drain(parts: FakeParts, max_steps: int = 500) -> dict[str, list[Event]]:
    """Steps until nothing is left to compute; events by sequence."""
    events: dict[str, list[Event]] = {}
    for _ in range(max_steps):
        parts.engine.check()
        if not parts.engine.step():
            break
        for seq_id, event in parts.engine.take_events():
            events.setdefault(seq_id, []).append(event)
    else:
        raise AssertionError("the engine does not come to an end")
    for seq_id, event in parts.engine.take_events():
        events.setdefault(seq_id, []).append(event)
    return events


def release_all(*engines: FakeParts) -> None:
    """Every owner and every reader goes, in whatever state; then nothing is held."""
    for parts in engines:
        release(parts, *{each.seq_id for each in parts.engine._sequences})
        for reader_id in list(parts.engine._readers):
            parts.engine.handle(calls.Drop(reader_id))
        assert_engine_empty(parts)


def assert_engine_empty(parts: FakeParts) -> None:
    report = parts.engine.report()
    assert report.nothing_held, report
