"""Native candidates of a draw: the token is the one that plain torch draws, whatever the logits are like."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kernels.isa import ISAS, Isa, name_of, runs_here
from engine.kernels.native_sampling import NativeSampling
from engine.noise import gumbel, row_key
from engine.sampler import sample
from engine.sampling_params import SamplingParams
from engine.step import SampleRow

NO_EOS: frozenset[int] = frozenset()
OTHER_ISAS = [isa for isa in ISAS if isa not in ("native", name_of("native")) and runs_here(isa)]


def _logits(kind: str, size: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    match kind:
        case "flat":
            return torch.zeros(size)
        case "steep":
            return torch.randn(size, generator=random) * 30
        case "huge":
            return torch.randn(size, generator=random) * 1e37
        case "masked":
            return torch.where(torch.rand(size, generator=random) < 0.9, -math.inf, torch.randn(size, generator=random))
        case _:
            return torch.randn(size, generator=random) * 3


@pytest.mark.parametrize("size", [1, 15, 320, 49_152])
@pytest.mark.parametrize("kind", ["usual", "flat", "steep", "huge", "masked"])
def test_draws_are_those_of_plain_torch(kernel_cache: Path, kind: str, size: int) -> None:
    native = NativeSampling(kernel_cache, "c++")
    for seed in range(60 if size > 1000 else 400):
        logits = _logits(kind, size, seed)
        logits[seed % size] = logits.amax().clamp(min=0.0)
        params = SamplingParams(max_tokens=1, temperature=(1.0, 0.3, 2.5, 0.01)[seed % 4], seed=seed)
        rows = [(SampleRow(params, seed, (), 0),)]
        assert sample(logits[None], rows, NO_EOS, native) == sample(logits[None], rows, NO_EOS)


@pytest.mark.parametrize("isa", OTHER_ISAS)
def test_code_for_other_instructions_draws_the_same(kernel_cache: Path, isa: Isa) -> None:
    one, other = NativeSampling(kernel_cache, "c++"), NativeSampling(kernel_cache, "c++", isa)
    for seed in range(50):
        logits = _logits("usual", 5000, seed)
        row = [(SampleRow(SamplingParams(max_tokens=1, temperature=1.0, seed=seed), 3, (), 0),)]
        assert sample(logits[None], row, NO_EOS, one) == sample(logits[None], row, NO_EOS, other)


def test_candidates_are_few_and_hold_the_winner_of_exact_scores(kernel_cache: Path) -> None:
    native, counts = NativeSampling(kernel_cache, "c++"), []
    for seed in range(30):
        logits, key = _logits("usual" if seed % 2 else "flat", 2000, seed).numpy(), row_key(seed, 0, 5)
        highest = float(logits.max())
        candidates = native.candidates(logits, highest, 0.7, key)
        assert candidates is not None
        exact = [(float(logit) - highest) / 0.7 + gumbel(key, token_id) for token_id, logit in enumerate(logits)]
        assert int(np.argmax(exact)) in candidates
        counts.append(len(candidates))
    assert np.mean(counts) < 8


def test_what_its_bounds_do_not_hold_for_is_left_to_torch(kernel_cache: Path) -> None:
    assert NativeSampling(kernel_cache, "c++").candidates(np.zeros(10, np.float32), 0.0, 1e-5, row_key(1, 0, 0)) is None
