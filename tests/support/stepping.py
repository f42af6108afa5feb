"""Engines driven step by step, without a thread."""

from __future__ import annotations

import itertools

from engine.events import Event
from engine.limits import EngineLimits
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from tests.support.engines import FakeParts, fake_parts, run_alone

_ids = itertools.count()


def a_spec(prompt: list[int] | range, max_tokens: int = 6, kind: SequenceKind = SequenceKind.LOCAL, **options: object) -> SequenceSpec:
    sampling = options.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return SequenceSpec(f"s{next(_ids)}", tuple(prompt), sampling, kind, **options)  # type: ignore[arg-type]


def expected(prompt: list[int] | range, max_tokens: int = 6, *, sampling: SamplingParams | None = None) -> list[int]:
    """Tokens of a fresh engine that computes this one sequence alone, unbatched, with nothing cached."""
    limits = EngineLimits(max_num_batched_tokens=256, max_prefill_tokens_per_step=256, enable_prefix_caching=False)
    return run_alone(fake_parts(limits=limits), a_spec(prompt, max_tokens, sampling=sampling))


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


def assert_engine_empty(parts: FakeParts) -> None:
    report = parts.engine.report()
    assert report.nothing_held, report
