"""States as arrows."""

from __future__ import annotations

import pytest

from engine.sampling_params import SamplingParams
from engine.sequence import ARROWS, TERMINAL, Sequence, SequenceKind, SequenceSpec, SequenceState


def a_sequence(kind: SequenceKind = SequenceKind.LOCAL, tokens: tuple[int, ...] = (1, 2, 3, 4, 5), salt: bytes = b"", fingerprint: str = "m") -> Sequence:
    spec = SequenceSpec("s", tokens, SamplingParams(max_tokens=4), kind, tenant_salt=salt)
    return Sequence(spec, block_size=2, model_fingerprint=fingerprint, arrival=1)


@pytest.mark.parametrize("state", list(SequenceState))
@pytest.mark.parametrize("onward", list(SequenceState))
def test_only_the_arrows_can_be_followed(state: SequenceState, onward: SequenceState) -> None:
    sequence = a_sequence()
    sequence.state = state
    if onward in ARROWS[state]:
        sequence.to(onward)
        assert sequence.state is onward
    else:
        with pytest.raises(AssertionError, match="cannot go from"):
            sequence.to(onward)


def test_every_live_state_can_be_cancelled() -> None:
    for state in SequenceState:
        if state not in TERMINAL:
            assert SequenceState.CANCELLED in ARROWS[state]


def test_names_of_blocks_differ_by_tenant_model_and_every_token_before() -> None:
    names = a_sequence().block_names(2)
    assert len(names) == 2
    assert a_sequence(tokens=(1, 2, 3, 4, 9)).block_names(2) == names
    assert a_sequence(tokens=(9, 2, 3, 4, 5)).block_names(2)[1] != names[1]
    assert a_sequence(salt=b"t").block_names(1) != names[:1]
    assert a_sequence(fingerprint="n").block_names(1) != names[:1]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_token_ids"):
        SequenceSpec("s", (), SamplingParams(max_tokens=1), SequenceKind.LOCAL)
