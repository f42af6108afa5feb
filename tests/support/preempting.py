"""Sequences in a pool so tight that the younger one is preempted."""

from __future__ import annotations

from dataclasses import replace

from engine.events import Event, Preempted, Readmitted
from engine.limits import EngineLimits
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceSpec
from tests.support.engines import FakeParts, fake_parts, token_ids
from tests.support.stepping import a_spec, events_of, release, submit

LIMITS = EngineLimits(max_num_seqs=8, max_num_batched_tokens=32, max_prefill_tokens_per_step=16, reserve_output_tokens=1)
PARAMS = SamplingParams(30, seed=3, ignore_eos=True)
STOP_TOKEN = 997
SHORT = replace(PARAMS, max_tokens=12, stop_token_ids=frozenset({STOP_TOKEN}))


def tight_parts(num_blocks: int = 12) -> FakeParts:
    """An engine that reserves one output token."""
    return fake_parts(num_blocks=num_blocks, max_model_len=48, limits=LIMITS)


def preempted(parts: FakeParts, *, n: int = 1, max_recompute_tokens: int | None = 0) -> tuple[SequenceSpec, list[Event]]:
    """The younger of two whose last sample was preempted, four tokens behind its prompt; the older one is gone since."""
    old = submit(parts, a_spec(range(8), sampling=SHORT))
    spec = replace(a_spec(range(100, 109), sampling=replace(SHORT, n=n), max_recompute_tokens=max_recompute_tokens), seq_id="s")
    submit(parts, spec)
    events: list[Event] = []
    while not any(isinstance(event, Preempted) for event in events):
        assert parts.engine.step()
        events.extend(events_of(parts).get("s", []))
    assert len(token_ids(events, n - 1)) == 4
    release(parts, old.seq_id)
    return spec, events


def readmitted(parts: FakeParts, *, n: int = 1) -> tuple[Readmitted, list[Event]]:
    """The same, with its blocks again."""
    _, events = preempted(parts, n=n)
    parts.engine.step()
    events.extend(events_of(parts)["s"])
    [told] = [event for event in events if isinstance(event, Readmitted)]
    return told, events
