"""The sampler: frequencies, filters, ties, noise, and independence of rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import SequenceError
from engine.noise import gumbel, gumbel_approximately, noise_bits, row_key
from engine.sampler import most_likely, sample
from engine.sampling_params import SampledToken, SamplingParams
from engine.step import SampleRow

NO_EOS: frozenset[int] = frozenset()
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
PLAIN = SamplingParams(max_tokens=1, temperature=1.0, seed=7)


def _sample(logits: torch.Tensor, params: SamplingParams, position: int = 0) -> SampledToken:
    outcome = sample(logits[None], [(SampleRow(params, position, (), 0),)], NO_EOS)[0]
    assert isinstance(outcome, tuple)
    return outcome[0]


def _ids(logits: torch.Tensor, params: SamplingParams, count: int) -> list[int]:
    return [_sample(logits, params, position).token_id for position in range(count)]


def _possible(logits: torch.Tensor, params: SamplingParams, count: int = 300) -> set[int]:
    return set(_ids(logits, params, count))


def test_noise_has_the_recorded_values() -> None:
    """A change here changes the output of every recorded seed and breaks mixed versions: it needs a new layout version."""
    assert [noise_bits(row_key(0, 0, 0), token_id) for token_id in (0, 1, 49151)] == RECORDED[0]
    assert [noise_bits(row_key(2**64 - 1, 3, 4097), token_id) for token_id in (0, 1, 49151)] == RECORDED[1]
    logits = torch.linspace(0, 4, 1000)
    assert _ids(logits, PLAIN, 8) == RECORDED[2]


@given(seed=st.integers(0, 2**64 - 1), sample_index=st.integers(0, 15), position=st.integers(0, 2**20), token_id=st.integers(0, 199))
@settings(max_examples=200, deadline=None)
def test_the_tensor_hash_equals_the_exact_one(seed: int, sample_index: int, position: int, token_id: int) -> None:
    key = row_key(seed, sample_index, position)
    approximate = gumbel_approximately(key, None, 200, torch.device("cpu"))
    assert float(approximate[token_id]) == pytest.approx(gumbel(key, token_id), abs=2e-5)
    assert torch.equal(gumbel_approximately(key, torch.tensor([token_id]), 200, torch.device("cpu")), approximate[token_id : token_id + 1])


def test_noise_is_uniform_and_never_infinite() -> None:
    keys = [row_key(seed, 0, position) for seed in range(4) for position in range(4)]
    bits = np.array([[noise_bits(key, token_id) for token_id in range(4096)] for key in keys])
    counts = np.bincount(((bits + 2**31) >> 26).ravel(), minlength=64)
    expected = bits.size / 64
    assert _chi_square(counts, np.full(64, expected)) < 115, "63 degrees of freedom: the chance of more is 1e-4"
    for bit in range(32):
        assert abs(((bits >> bit) & 1).mean() - 0.5) < 4 * 0.5 / math.sqrt(bits.size), f"bit {bit}"
    values = torch.stack([gumbel_approximately(key, None, 200_000, torch.device("cpu")) for key in keys])
    assert values.isfinite().all()
    assert float(values.mean()) == pytest.approx(0.5772, abs=0.005)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=0.01)


@pytest.mark.parametrize("apart", ["seed", "sample", "position", "token", "seed's upper half"])
def test_noise_streams_are_uncorrelated(apart: str) -> None:
    size = 100_000
    base = gumbel_approximately(row_key(5, 0, 9), None, size, torch.device("cpu"))
    keys = {"seed": row_key(6, 0, 9), "sample": row_key(5, 1, 9), "position": row_key(5, 0, 10), "seed's upper half": row_key(5 + 2**32, 0, 9)}
    other = torch.roll(base, 1) if apart == "token" else gumbel_approximately(keys[apart], None, size, torch.device("cpu"))
    correlation = float(torch.corrcoef(torch.stack([base, other]))[0, 1])
    assert abs(correlation) < 4 / math.sqrt(size)


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        replace(PLAIN, temperature=0.6),
        replace(PLAIN, temperature=1.7),
        replace(PLAIN, top_k=6),
        replace(PLAIN, top_p=0.8),
        replace(PLAIN, min_p=0.1),
        replace(PLAIN, temperature=1.3, top_k=10, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_frequencies_match_the_filtered_softmax(params: SamplingParams) -> None:
    logits = torch.tensor([2.0, 1.5, 1.5, 1.0, 0.3, 0.0, -0.2, -0.7, -1.0, -1.4, -2.0, -torch.inf])
    count = 6000
    expected = _filtered_softmax(logits, params)
    observed = np.bincount(_ids(logits, params, count), minlength=len(logits))
    kept = expected > 0
    assert observed[~kept].sum() == 0
    assert _chi_square(observed[kept], expected[kept] * count) < 38, "at most 11 degrees of freedom: the chance of more is below 1e-4"


def _filtered_softmax(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The definition, plainly: sort, cut, renormalize."""
    order = sorted(range(len(logits)), key=lambda token_id: (-float(logits[token_id]), token_id))
    order = order[: params.top_k or None]
    weights = [math.exp(float(logits[token_id]) / params.temperature) for token_id in order]
    mass, kept = 0.0, 0
    while kept < len(order) and mass < params.top_p * sum(weights):
        mass += weights[kept]
        kept += 1
    probabilities = np.zeros(len(logits))
    for token_id, weight in list(zip(order, weights, strict=True))[:kept]:
        if weight >= params.min_p * weights[0]:
            probabilities[token_id] = weight
    normalized: np.ndarray = probabilities / probabilities.sum()
    return normalized


def _chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def test_greedy_takes_the_lower_id_of_equal_logits() -> None:
    logits = torch.zeros(50_000)
    logits[[41, 40_000, 7]] = 3.0
    assert _sample(logits, GREEDY).token_id == 7


def test_top_k_keeps_the_lower_ids_of_equal_logits() -> None:
    logits = torch.zeros(2000)
    logits[[1500, 900, 30, 1999]] = 1.0
    assert _possible(logits, replace(PLAIN, top_k=3)) == {30, 900, 1500}
    assert _possible(logits, replace(PLAIN, top_k=1)) == {30}
    assert _possible(torch.zeros(2000), replace(PLAIN, top_k=2)) == {0, 1}


def test_top_p_sorts_the_whole_vocabulary_only_when_the_mass_demands_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(values: torch.Tensor, count: int) -> torch.Tensor:
        sizes.append(count)
        return most_likely(values, count)

    monkeypatch.setattr("engine.sampler.most_likely", counted)
    peaked = torch.linspace(0, -100, 3000)
    _sample(peaked, replace(PLAIN, top_p=0.9))
    assert sizes == [256]
    sizes.clear()
    _sample(torch.linspace(0, -10, 30_000), replace(PLAIN, top_p=0.9))
    assert sizes == [256, 4096, 30_000]
    assert len(_possible(torch.zeros(3000), replace(PLAIN, top_p=0.5), 4000)) > 1000
    assert max(_possible(torch.zeros(3000), replace(PLAIN, top_p=0.5), 4000)) < 1500, "exactly the first half: ties go to the lower id"


def test_a_token_that_is_out_is_none_of_the_most_likely() -> None:
    values = torch.full((5000,), -torch.inf)
    values[[4000, 3, 77]] = torch.tensor([1.0, 0.5, 1.0])
    for count in (2, 3, 10, 5000, 9000):
        assert most_likely(values, count).tolist() == [77, 4000, 3][:count]


def test_min_p_alone_keeps_exactly_the_tokens_above_its_share() -> None:
    logits = torch.tensor([0.0, math.log(0.5), math.log(0.101), math.log(0.0999), -20.0])
    assert _possible(logits, replace(PLAIN, min_p=0.1), 500) == {0, 1, 2}
    assert _possible(logits, replace(PLAIN, min_p=1.0)) == {0}


def test_a_tiny_temperature_is_greedy_among_unequal_logits_and_fair_among_equal_ones() -> None:
    logits = torch.full((1000,), 20.0)
    logits[500:] = 19.999
    counts = Counter(_ids(logits, replace(PLAIN, temperature=1e-6), 400))
    assert max(counts) < 500
    assert len(counts) > 250


@pytest.mark.parametrize("params", [GREEDY, PLAIN, replace(PLAIN, top_k=40), replace(PLAIN, top_p=0.9), replace(PLAIN, min_p=0.02, logprobs=5)], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 40_001, generator=generator) * 3
    rows = [SampleRow(replace(params, seed=index), 100 + index, (), 0) for index in range(7)]
    together = sample(logits, [(row,) for row in rows], NO_EOS)
    assert together == [sample(logits[index : index + 1], [(rows[index],)], NO_EOS)[0] for index in range(7)]
    order = [3, 0, 6]
    assert sample(logits[order], [(rows[index],) for index in order], NO_EOS) == [together[index] for index in order]


def test_seed_sample_index_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(10_000)
    draws = [
        _sample(logits, PLAIN, 5),
        _sample(logits, PLAIN, 6),
        _sample(logits, replace(PLAIN, seed=8), 5),
        _sample(logits, replace(PLAIN, sample_index=1), 5),
    ]
    assert len({token.token_id for token in draws}) == 4
    assert _sample(logits, PLAIN, 5) == draws[0]


def test_logprobs_are_of_the_softmax_before_temperature_with_ties_to_the_lower_id() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0])
    expected = torch.log_softmax(logits, -1)
    token = _sample(logits, replace(PLAIN, temperature=0.3, top_k=1, logprobs=2))
    assert token.token_id == 1
    assert token.logprob == pytest.approx(float(expected[1]))
    assert [token_id for token_id, _ in token.top_logprobs] == [1, 2]
    assert _sample(logits, replace(GREEDY, logprobs=0)).top_logprobs == ()
    assert _sample(logits, GREEDY).logprob is None


@pytest.mark.parametrize("broken", [[torch.nan, 1.0, 2.0], [-torch.inf] * 3, [torch.inf, 1.0, 2.0]])
def test_a_row_without_usable_logits_fails_alone(broken: list[float]) -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0], broken])
    for params in (GREEDY, PLAIN):
        outcomes = sample(logits, [(SampleRow(params, 4, (), 0),)] * 2, NO_EOS)
        assert isinstance(outcomes[0], tuple)
        assert isinstance(outcomes[1], SequenceError)


RECORDED: tuple[list[int], list[int], list[int]] = (
    [2009573276, 136288849, -1299890067],
    [-1936730500, 1504604744, -979014989],
    [871, 855, 973, 829, 410, 801, 970, 906],
)
