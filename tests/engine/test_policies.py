"""Policies decide when a prompt is computed, never what comes of it, and starve none."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from engine.config import ConfigError, EngineConfig
from engine.events import ChunkComputed, Event, Tokens
from engine.limits import EngineLimits, PolicyName
from engine.policies import POLICIES
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceSpec
from tests.support.engines import FakeParts, fake_parts, sampled_tokens
from tests.support.stepping import a_spec, drain, events_of, expected_events, release_all, submit

NAMES = tuple(POLICIES)


def _parts(policy: PolicyName, num_blocks: int = 256, **limits: Any) -> FakeParts:
    defaults: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_prefill_tokens_per_step": 16, "reserve_output_tokens": 1}
    return fake_parts(num_blocks=num_blocks, max_model_len=512, limits=EngineLimits(**defaults | limits, scheduling_policy=policy))


def _long(start: int = 0, length: int = 160) -> SequenceSpec:
    return a_spec([(start + each) % 900 + 50 for each in range(length)], 4)


def _steps(parts: FakeParts, count: int) -> list[dict[str, list[Event]]]:
    """Events of each of the next steps."""
    found = []
    for _ in range(count):
        parts.engine.step()
        found.append(events_of(parts))
    return found


def _prompt_tokens(events: Iterable[Event]) -> int:
    return sum(event.num_tokens for event in events if isinstance(event, ChunkComputed))


def _first_token_step(steps: list[dict[str, list[Event]]], seq_id: str) -> int:
    return next(number for number, each in enumerate(steps) if any(isinstance(event, Tokens) for event in each.get(seq_id, ())))


@pytest.mark.parametrize("policy", NAMES)
def test_no_policy_changes_a_token(policy: PolicyName) -> None:
    chance = random.Random(5)
    parts = _parts(policy, num_blocks=64, prefill_quota=5, max_decode_steps=3)
    specs = []
    for number in range(24):
        params = SamplingParams(max_tokens=chance.randint(1, 12), temperature=chance.choice([0.0, 0.9]), seed=number, n=chance.choice([1, 1, 2]))
        specs.append(submit(parts, a_spec([chance.randint(50, 900) for _ in range(chance.randint(1, 60))], sampling=params)))
    events = drain(parts, 3000)
    for spec in specs:
        for index in range(spec.sampling.n):
            alone = sampled_tokens(expected_events(list(spec.prompt_token_ids), sampling=spec.sampling, index=index))
            assert sampled_tokens(events[spec.seq_id], index) == alone
    release_all(parts)


def test_fifo_computes_a_long_prompt_to_its_end_first() -> None:
    parts = _parts("fifo")
    long, short = submit(parts, _long()), submit(parts, a_spec([7, 8, 9], 4))
    steps = _steps(parts, 20)
    assert _first_token_step(steps, long.seq_id) == 9
    assert _first_token_step(steps, short.seq_id) == 10
    release_all(parts)


def test_shortest_first_goes_past_a_long_prompt_that_has_begun() -> None:
    parts = _parts("shortest")
    long = submit(parts, _long())
    first = _steps(parts, 2)
    short = submit(parts, a_spec([7, 8, 9], 4))
    steps = _steps(parts, 20)
    assert _prompt_tokens(event for each in first for event in each[long.seq_id]) == 32
    assert _first_token_step(steps, short.seq_id) == 0
    assert _prompt_tokens(steps[0][long.seq_id]) == 13, "what the short one leaves of the budget is the long one's"
    release_all(parts)


def test_a_long_prompt_is_overtaken_only_until_as_much_was_computed_as_it_is_longer() -> None:
    parts = _parts("shortest")
    long = submit(parts, _long(length=80))
    number, short_tokens = 0, 0
    while True:
        number += 1
        # A stream of short prompts that alone would fill every step.
        submit(parts, a_spec([100 + number % 700, *range(300, 315)], 1))
        parts.engine.step()
        events = events_of(parts)
        if any(isinstance(event, Tokens) for event in events.get(long.seq_id, ())):
            break
        short_tokens += sum(_prompt_tokens(each) for seq_id, each in events.items() if seq_id != long.seq_id)
        assert number < 50, "it is starved"
    assert 80 - 16 - 32 <= short_tokens <= 80 + 16
    drain(parts)
    release_all(parts)


def test_without_much_aging_it_would_wait_longer() -> None:
    waited = {}
    for aging in (0.25, 4.0):
        parts = _parts("shortest", prefill_aging=aging)
        long = submit(parts, _long(length=80))
        for number in range(200):
            submit(parts, a_spec([100 + number % 700, *range(300, 315)], 1))
            parts.engine.step()
            if any(isinstance(event, Tokens) for event in events_of(parts).get(long.seq_id, ())):
                waited[aging] = number
                break
        drain(parts, 1000)
        release_all(parts)
    assert waited[4.0] * 2 < waited[0.25]


def test_a_quota_holds_only_while_others_decode() -> None:
    parts = _parts("quota", prefill_quota=5)
    stream = submit(parts, a_spec([1, 2, 3], 40))
    assert _prompt_tokens(_steps(parts, 1)[0][stream.seq_id]) == 3
    long = submit(parts, _long())
    steps = _steps(parts, 10)
    assert [_prompt_tokens(each[long.seq_id]) for each in steps] == [5] * 10
    drain(parts)
    alone = submit(parts, _long(3))
    assert _prompt_tokens(_steps(parts, 1)[0][alone.seq_id]) == 16
    drain(parts)
    release_all(parts)


def test_decode_first_computes_prompts_when_nothing_decodes_or_after_its_steps() -> None:
    parts = _parts("decode-first", max_decode_steps=3)
    stream = submit(parts, a_spec([1, 2, 3], 12))
    _steps(parts, 1)
    long = submit(parts, _long())
    steps = _steps(parts, 16)
    assert [_prompt_tokens(each.get(long.seq_id, ())) for each in steps] == [0, 0, 0, 16, 0, 0, 0, 16, 0, 0, 0, *[16] * 5]
    assert sum(sum(isinstance(event, Tokens) for event in each.get(stream.seq_id, ())) for each in steps) == 11
    drain(parts)
    release_all(parts)


@pytest.mark.parametrize("policy", NAMES)
def test_a_priority_comes_before_every_policy(policy: PolicyName) -> None:
    parts = _parts(policy, max_decode_steps=1)
    short = submit(parts, a_spec([7, 8, 9], 1, priority=1))
    urgent = submit(parts, _long())
    steps = _steps(parts, 12)
    assert _first_token_step(steps, urgent.seq_id) <= _first_token_step(steps, short.seq_id)
    release_all(parts)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a policy": ({"scheduling_policy": "lifo"}, "'lifo' is unknown; one of fifo, shortest, decode-first, quota"),
    "a quota": ({"prefill_quota": 0}, "below 1"),
    "steps": ({"max_decode_steps": 0}, "below 1"),
    "aging": ({"prefill_aging": 0.0}, "could wait for ever"),
}


@pytest.mark.parametrize("name", BAD)
def test_settings_that_could_starve_a_prompt_are_refused(name: str, tmp_path: Any) -> None:
    fields, text = BAD[name]
    with pytest.raises(ConfigError, match=text) as refused:
        EngineConfig(tmp_path, **fields)
    assert refused.value.field == next(iter(fields))
    assert EngineConfig(tmp_path).limits.scheduling_policy == "fifo"
