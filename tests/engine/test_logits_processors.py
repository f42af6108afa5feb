"""Parameters that change logits: against transformers' own processors, against the definitions in float64, and one row beside others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine.errors import NoTokenLeftError, SequenceError
from engine.logits_processors import changes_logits, processed
from engine.sampler import sample
from engine.sampling_params import FinishReason, SampledToken, SamplingParams, finish_of
from engine.step import SampleRow

VOCAB_SIZE = 60
EOS = frozenset({2, 7})
PLAIN = SamplingParams(max_tokens=50)
PROMPT = [5, 9, 11, 5, 30, 41]
OUTPUT = [9, 12, 12, 17, 9, 9, 33]


def _row(params: SamplingParams, output: list[int] = OUTPUT) -> SampleRow:
    return SampleRow(params, len(PROMPT) + len(output), PROMPT + output, len(PROMPT))


def _logits(seed: int = 0, size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


TRANSFORMERS: dict[str, tuple[SamplingParams, Callable[[], LogitsProcessor]]] = {
    "repetition": (replace(PLAIN, repetition_penalty=1.3), lambda: RepetitionPenaltyLogitsProcessor(1.3)),
    "repetition below 1": (replace(PLAIN, repetition_penalty=0.4), lambda: RepetitionPenaltyLogitsProcessor(0.4)),
    "bad words": (
        replace(PLAIN, bad_words_ids=((20,), (9, 33, 21), (33, 22), (12, 23), (33, 33), (9, 9, 33, 24))),
        lambda: NoBadWordsLogitsProcessor([[20], [9, 33, 21], [33, 22], [12, 23], [33, 33], [9, 9, 33, 24]], [2]),
    ),
    "a bad word over the prompt's end": (replace(PLAIN, bad_words_ids=((5, 30, 41, 9, 12),)), lambda: NoBadWordsLogitsProcessor([[5, 30, 41, 9, 12]], [2])),
    "min_tokens": (replace(PLAIN, min_tokens=8), lambda: MinNewTokensLengthLogitsProcessor(len(PROMPT), 8, sorted(EOS))),
    "min_tokens reached": (replace(PLAIN, min_tokens=7), lambda: MinNewTokensLengthLogitsProcessor(len(PROMPT), 7, sorted(EOS))),
    "logit bias": (replace(PLAIN, logit_bias=((3, -100.0), (4, 2.5))), lambda: SequenceBiasLogitsProcessor([[[3], -100.0], [[4], 2.5]])),
    "allowed": (replace(PLAIN, allowed_token_ids=(8, 3, 50)), lambda: PrefixConstrainedLogitsProcessor(lambda *_: [8, 3, 50], num_beams=1)),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("output", [OUTPUT, [9], []], ids=len)
def test_logits_equal_those_of_transformers(name: str, output: list[int]) -> None:
    params, make = TRANSFORMERS[name]
    logits = _logits()
    expected = make()(torch.tensor([PROMPT + output]), logits[None].clone())[0]
    assert torch.equal(processed(logits, _row(params, output), EOS), expected)


def _reference(logits: npt.NDArray[np.float64], row: SampleRow) -> npt.NDArray[np.float64]:
    """The definitions, one token at a time, in float64."""
    params, values = row.params, logits.copy()
    output = list(row.token_ids[row.num_prompt_tokens :])
    for token_id in range(len(values)):
        if params.allowed_token_ids and token_id not in params.allowed_token_ids:
            values[token_id] = -math.inf
        for run in params.bad_words_ids:
            if run[-1] == token_id and [*row.token_ids, token_id][-len(run) :] == list(run):
                values[token_id] = -math.inf
        ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | EOS
        if len(output) < params.min_tokens and token_id in ends:
            values[token_id] = -math.inf
        values[token_id] += dict(params.logit_bias).get(token_id, 0.0)
        if token_id in row.token_ids:
            values[token_id] *= 1 / params.repetition_penalty if values[token_id] > 0 else params.repetition_penalty
        values[token_id] -= output.count(token_id) * params.frequency_penalty + (token_id in output) * params.presence_penalty
    return values


TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)


def _or(neutral: object, values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(st.just(neutral), values)


PARAMS: st.SearchStrategy[SamplingParams] = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    min_tokens=st.integers(0, 12),
    temperature=st.sampled_from([0.0, 1e-6, 0.7, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 1e-6]),
    top_k=st.sampled_from([0, 1, 20, VOCAB_SIZE]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.frozensets(TOKEN_IDS, max_size=3),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 3),
    presence_penalty=_or(0.0, st.floats(-2, 2, width=32)),
    frequency_penalty=_or(0.0, st.floats(-2, 2, width=32)),
    repetition_penalty=_or(1.0, st.floats(0.125, 8, width=32)),
    logit_bias=_or((), st.dictionaries(TOKEN_IDS, st.floats(-100, 100, width=32), max_size=8).map(lambda biases: tuple(sorted(biases.items())))),
    allowed_token_ids=_or((), st.lists(TOKEN_IDS, unique=True, min_size=1, max_size=8).map(tuple)),
    bad_words_ids=st.lists(st.lists(TOKEN_IDS, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
)
TOKENS = st.lists(st.integers(0, 9) | TOKEN_IDS, max_size=12)
ROWS = st.builds(lambda params, prompt, output: SampleRow(params, len(prompt) + len(output), prompt + output, len(prompt)), PARAMS, TOKENS.filter(bool), TOKENS)


@given(ROWS, st.integers(0, 99))
@settings(max_examples=300, deadline=None)
def test_logits_equal_the_definitions_in_float64(row: SampleRow, seed: int) -> None:
    logits = _logits(seed)
    before = logits.clone()
    values = processed(logits, row, EOS)
    expected = _reference(logits.double().numpy(), row)
    np.testing.assert_allclose(values.numpy(), expected, rtol=1e-5, atol=2e-5)
    assert torch.equal(logits, before), "the row itself stays as it is: log probabilities are taken from it"
    if not changes_logits(row):
        assert torch.equal(values, logits)


@given(st.lists(ROWS, min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_a_processed_row_does_not_depend_on_the_rows_beside_it(rows: list[SampleRow], seed: int) -> None:
    logits = torch.stack([_logits(seed + index) for index in range(len(rows))])
    together = sample(logits, [(row,) for row in rows], EOS)
    alone = [sample(logits[index : index + 1], [(row,)], EOS)[0] for index, row in enumerate(rows)]
    assert list(map(str, together)) == list(map(str, alone))
    for index, (row, outcome) in enumerate(zip(rows, together, strict=True)):
        possible = np.isfinite(_reference(logits[index].double().numpy(), row))
        if isinstance(outcome, SequenceError):
            assert not possible.any()
        else:
            assert possible[outcome[0].token_id], "a token that is out stays out, whatever the filters keep"


@pytest.mark.parametrize(
    "params", [replace(PLAIN, top_k=5), replace(PLAIN, top_p=0.999), replace(PLAIN, min_p=1e-9), PLAIN], ids=["top_k", "top_p", "min_p", "none"]
)
def test_filters_that_would_keep_more_tokens_than_are_left_sample_those_left(params: SamplingParams) -> None:
    logits = _logits(size=5000)
    logits[4321] = logits[17]
    row = replace(params, allowed_token_ids=(4321, 17))
    found = [sample(logits[None], [(SampleRow(row, position, [1], 1),)], EOS)[0] for position in range(60)]
    assert {outcome[0].token_id for outcome in found if isinstance(outcome, tuple)} == {17, 4321}
    assert all(isinstance(outcome, tuple) for outcome in found)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-30, 1e-6, 1.0])
def test_a_row_whose_parameters_leave_nothing_fails_alone(temperature: float) -> None:
    impossible = replace(PLAIN, temperature=temperature, allowed_token_ids=(2, 7), min_tokens=8)
    logits = torch.stack([_logits()] * 3)
    outcomes = sample(logits, [(_row(replace(PLAIN, temperature=temperature)),), (_row(PLAIN), _row(impossible)), (_row(impossible, [*OUTPUT, 3]),)], EOS)
    assert [type(outcome) for outcome in outcomes] == [tuple, NoTokenLeftError, tuple]
    assert str(outcomes[1]) == f"the sampling parameters leave no token at position {len(PROMPT) + len(OUTPUT)}"
    assert isinstance(outcomes[2], tuple)
    assert outcomes[2][0].token_id in EOS


@pytest.mark.parametrize("penalty", [2.0**-149, 1e-30, 3.4e38])
def test_an_extreme_repetition_penalty_gives_no_infinity_and_no_nan(penalty: float) -> None:
    logits = torch.tensor([0.0, 2.0, -2.0, -math.inf, 1.0, 3.0])
    params = replace(PLAIN, repetition_penalty=penalty, frequency_penalty=-2.0, presence_penalty=2.0)
    values = processed(logits, SampleRow(params, 8, [0, 1, 2, 3, 0, 1, 2, 3], 4), frozenset())
    assert not values.isnan().any()
    assert float(values.amax()) < math.inf
    assert float(values[3]) == -math.inf
    assert values[4:].tolist() == [1.0, 3.0]
    for temperature in (0.0, 1e-45, 1.0):
        outcome = sample(logits[None], [(SampleRow(replace(params, temperature=temperature), 8, [0, 1, 2, 3, 0, 1, 2, 3], 4),)], frozenset())[0]
        assert isinstance(outcome, tuple)
        assert outcome[0].token_id == (1 if penalty < 1 else 5) or temperature == 1.0


def test_ties_that_parameters_make_go_to_the_lower_id() -> None:
    logits = torch.zeros(3000)
    logits[[2500, 40]] = torch.tensor([4.0, 1.0])
    logits[7] = 2.0
    params = replace(PLAIN, temperature=0.0, logit_bias=((40, 3.0),))
    assert _token(logits, params).token_id == 40
    assert _token(logits, replace(params, logit_bias=((40, 3.0), (7, 2.0)))).token_id == 7
    assert _token(logits, replace(params, temperature=1.0, top_k=1)).token_id == 40


def test_log_probabilities_are_those_of_the_logits_before_everything() -> None:
    logits = _logits()
    params = replace(PLAIN, temperature=0.0, logprobs=3, allowed_token_ids=(30, 31), repetition_penalty=4.0, logit_bias=((31, 50.0),))
    token = _token(logits, params)
    expected = torch.log_softmax(logits, -1)
    assert token.token_id == 31
    assert token.logprob == float(expected[31])
    assert [token_id for token_id, _ in token.top_logprobs] == torch.topk(expected, 3).indices.tolist()


def test_a_sequence_may_end_with_the_token_from_which_on_its_end_is_sampled() -> None:
    """The mask and `finish_of` count alike: with min_tokens = m the (m+1)-th token may be the last, and no earlier one."""
    params = replace(PLAIN, min_tokens=3, stop_token_ids=frozenset({44}))
    for num_output in range(6):
        values = processed(_logits(), _row(params, [1] * num_output), EOS)
        for token_id in (2, 7, 44):
            ends = finish_of(params, EOS, token_id, num_output + 1, len(PROMPT) + num_output + 1, 512)
            assert math.isfinite(values[token_id]) == (ends is not None and ends.reason is FinishReason.STOP)
    ignoring = replace(params, ignore_eos=True)
    assert processed(_logits(), _row(ignoring, []), EOS).isfinite().sum() == VOCAB_SIZE - 1


def test_min_tokens_costs_nothing_where_it_forbids_nothing() -> None:
    early = replace(PLAIN, min_tokens=50)
    for params in (early, replace(early, ignore_eos=True), replace(early, ignore_eos=True, stop_token_ids=frozenset({44}))):
        row = _row(params, [])
        assert changes_logits(row) == (not torch.equal(processed(_logits(), row, EOS), _logits()))
    assert not changes_logits(_row(replace(early, ignore_eos=True), []))


def test_bad_words_of_every_length_end_in_the_tokens_so_far_of_prompt_and_output() -> None:
    runs = tuple((*(PROMPT + OUTPUT)[-length:], 40 + length) for length in range(1, 12))
    values = processed(_logits(), _row(replace(PLAIN, bad_words_ids=((1, *PROMPT, *OUTPUT, 39), *runs))), EOS)
    assert torch.nonzero(values == -math.inf).flatten().tolist() == list(range(41, 52))


def _token(logits: torch.Tensor, params: SamplingParams) -> SampledToken:
    outcome = sample(logits[None], [(SampleRow(params, 1, [0], 1),)], EOS)[0]
    assert isinstance(outcome, tuple)
    return outcome[0]
