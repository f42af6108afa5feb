"""A whole step by Triton's kernels against the same step in plain torch, and the tokens that a batch must not change."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from checks.tiny_models import VOCAB_SIZE, write_tiny_model
from engine.model import LoadedModel, load_model
from engine.operations import TorchOperations
from engine.triton_operations import TritonOperations
from tests.support.fused_runs import FusedModel
from tests.support.packed_runs import Run

_LENGTHS = (1, 40)
_NUM_TOKENS = 2


def _operations(model: LoadedModel, *, batch_invariant: bool) -> TritonOperations:
    return TritonOperations(
        num_heads=model.num_heads, head_dim=model.head_dim, max_num_seqs=8, max_kv_len=512, device=torch.device("cpu"), batch_invariant=batch_invariant
    )


def _runs(first_block: int = 3) -> list[Run]:
    prompts = [random.Random(length).choices(range(3, VOCAB_SIZE), k=length) for length in _LENGTHS]
    return [Run(prompt, list(range(first_block + 8 * place, first_block + 8 * (place + 1)))) for place, prompt in enumerate(prompts)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_tokens_and_logits_are_those_of_plain_torch(tmp_path: Path, family: str) -> None:
    directory = write_tiny_model(tmp_path, family)
    loaded = load_model(directory)
    reference, model = FusedModel(loaded, TorchOperations()), FusedModel(load_model(directory), _operations(loaded, batch_invariant=False))
    for expected, run in zip(_runs(), _runs(), strict=True):
        reference.generate(expected, _NUM_TOKENS)
        model.generate(run, _NUM_TOKENS)
        assert run.token_ids == expected.token_ids
        assert (torch.stack(run.logits) - torch.stack(expected.logits)).abs().max() < 1e-4


def test_a_batch_invariant_run_has_the_same_bits_alone_and_batched_in_other_chunks(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_model(tmp_path, "llama"))
    model = FusedModel(loaded, _operations(loaded, batch_invariant=True))
    alone = _runs()
    for run in alone:
        model.generate(run, _NUM_TOKENS)
    batched = _runs(40)
    while unfinished := [run for run in batched if len(run.logits) < _NUM_TOKENS]:
        model.step([(run, min(23, len(run.token_ids) - run.num_computed)) for run in unfinished], num_padding=2)
    for one, other in zip(alone, batched, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.equal(torch.stack(one.logits), torch.stack(other.logits))
