"""Every arrow of a sequence's states is followed by an engine, in the situation that its module names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import calls
from engine.sampling_params import SampledToken
from engine.sequence import ARROWS, Sequence, SequenceKind, SequenceState
from tests.support.engines import FakeParts
from tests.support.fake_device import POISON_TOKEN
from tests.support.preempting import preempted, readmitted, tight_parts
from tests.support.stepping import a_spec, assert_engine_empty, drain, finish_step, late_parts, release, submit

S = SequenceState
Arrow = tuple[SequenceState, SequenceState]


def waits() -> FakeParts:
    parts = tight_parts()
    submit(parts, a_spec(range(6)))
    return parts


def computes_its_prompt(prompt: list[int] | range = range(20), max_tokens: int = 2, kind: SequenceKind = SequenceKind.LOCAL) -> FakeParts:
    parts = tight_parts()
    submit(parts, a_spec(prompt, max_tokens, kind))
    parts.engine.step()
    return parts


def decodes(poison_position: int | None = None) -> FakeParts:
    parts = computes_its_prompt(range(6), 9)
    if poison_position is not None:
        [sequence] = parts.engine.scheduler.running
        parts.device.poisoned = (sequence.sample_id, poison_position)
    return parts


def is_preempted(n: int = 1, max_recompute_tokens: int | None = None) -> FakeParts:
    parts = tight_parts(8 if n > 1 else 7)
    preempted(parts, n=n, max_recompute_tokens=max_recompute_tokens)
    return parts


def is_preempted_before_its_first_token() -> FakeParts:
    parts = tight_parts(8)
    submit(parts, a_spec(range(8), 12))
    for _ in range(4):
        parts.engine.step()
    submit(parts, a_spec(range(100, 118), 2))
    for _ in range(2):
        parts.engine.step()
    return parts


def waits_for_kv() -> FakeParts:
    parts = tight_parts()
    spec = a_spec(range(6), kind=SequenceKind.REMOTE_KV)
    parts.engine.handle(calls.Reserve(spec))
    return parts


def is_committed() -> FakeParts:
    parts = waits_for_kv()
    [sequence] = parts.engine._sequences
    parts.engine.handle(calls.Commit(sequence.seq_id, (SampledToken(1),)))
    return parts


def a_sibling_fails(parts: FakeParts, position: int) -> FakeParts:
    parts.device.poisoned = ("s", position)
    drain(parts)
    return parts


def waits_for_kv_again(n: int = 1) -> FakeParts:
    parts = tight_parts(8 if n > 1 else 7)
    readmitted(parts, n=n)
    return parts


def is_held() -> FakeParts:
    return computes_its_prompt(range(6), kind=SequenceKind.PREFILL_ONLY)


def fails_while_it_computes() -> FakeParts:
    parts = late_parts()
    submit(parts, a_spec([1, POISON_TOKEN]))
    parts.engine.launch()
    finish_step(parts)
    return parts


def never_fits() -> FakeParts:
    parts = tight_parts()
    submit(parts, a_spec(range(100)))
    return parts


def fails_beside_a_preempted_sibling() -> FakeParts:
    parts = is_preempted(n=2)
    submit(parts, a_spec(range(200, 227), 1, priority=-1))  # does not fit yet, and is before it in the queue
    return a_sibling_fails(parts, 13)


SITUATIONS: dict[Arrow, Callable[[], FakeParts]] = {
    (S.WAITING, S.PREFILLING): computes_its_prompt,
    (S.WAITING, S.REJECTED): never_fits,
    (S.WAITING, S.CANCELLED): waits,
    (S.WAITING_FOR_KV, S.DECODING): is_committed,
    (S.WAITING_FOR_KV, S.CANCELLED): waits_for_kv,
    (S.WAITING_FOR_KV, S.FAILED): lambda: a_sibling_fails(waits_for_kv_again(n=2), 14),
    (S.PREFILLING, S.DECODING): decodes,
    (S.PREFILLING, S.HELD): is_held,
    (S.PREFILLING, S.FINISHED): lambda: computes_its_prompt(range(6), 1),
    (S.PREFILLING, S.PREEMPTED): is_preempted_before_its_first_token,
    (S.PREFILLING, S.CANCELLED): computes_its_prompt,
    (S.PREFILLING, S.FAILED): fails_while_it_computes,
    (S.DECODING, S.FINISHED): lambda: computes_its_prompt(range(6), 2),
    (S.DECODING, S.PREEMPTED): is_preempted,
    (S.DECODING, S.CANCELLED): decodes,
    (S.DECODING, S.FAILED): lambda: decodes(poison_position=7),
    (S.PREEMPTED, S.PREFILLING): is_preempted,
    (S.PREEMPTED, S.WAITING_FOR_KV): waits_for_kv_again,
    (S.PREEMPTED, S.CANCELLED): is_preempted,
    (S.PREEMPTED, S.FAILED): fails_beside_a_preempted_sibling,
    (S.HELD, S.CANCELLED): is_held,
}
ALL = [(state, onward) for state, onwards in ARROWS.items() for onward in sorted(onwards, key=lambda each: each.value)]


def test_every_arrow_has_a_situation() -> None:
    assert SITUATIONS.keys() == set(ALL)


@pytest.mark.parametrize("arrow", ALL, ids=lambda arrow: f"{arrow[0].value}-{arrow[1].value}")
def test_an_engine_follows_the_arrow_and_gives_everything_back(arrow: Arrow, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: set[Arrow] = set()
    to = Sequence.to

    def record(self: Sequence, state: SequenceState) -> None:
        followed.add((self.state, state))
        to(self, state)

    monkeypatch.setattr(Sequence, "to", record)
    parts = SITUATIONS[arrow]()
    if arrow[1] is not S.CANCELLED:
        drain(parts)
    release(parts, *{each.seq_id for each in parts.engine._sequences})
    assert arrow in followed
    assert_engine_empty(parts)
