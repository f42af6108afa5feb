"""A step out of fused operations in plain torch against transformers' own generate."""

from __future__ import annotations

import random
import weakref
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checks.tiny_models import VOCAB_SIZE, WINDOW, write_tiny_model
from engine.describe import describe_decoder
from engine.fused_weights import fuse_weights, products_of, weight_bytes
from engine.model import load_model
from engine.operations import TorchOperations
from tests.support.fused_runs import MAX_ROWS, FusedModel, device_batch
from tests.support.packed_runs import Run

DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3")
NUM_TOKENS = 6
LENGTHS = (1, WINDOW - 1, WINDOW + 1, 70, 150)
MAX_LOGIT_ERROR = 1e-4


def _prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB_SIZE), k=length)


def _expected(directory: Path, length: int) -> tuple[list[int], torch.Tensor]:
    """All tokens of transformers' greedy continuation of a prompt, and its logits, [NUM_TOKENS, vocabulary]."""
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([_prompt(length)])
    output = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[0].tolist(), torch.cat(output.logits)


@pytest.fixture(scope="module", params=DENSE)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each dense family's tiny checkpoint."""
    return write_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def test_tokens_and_logits_are_those_of_transformers_alone_chunked_batched_and_padded(directory: Path) -> None:
    model = FusedModel(load_model(directory), TorchOperations())
    alone = [Run(_prompt(length), list(range(3, 20))) for length in LENGTHS]
    for run in alone:
        model.generate(run, NUM_TOKENS)
    batched = [Run(_prompt(length), list(range(20 + 12 * place, 32 + 12 * place))) for place, length in enumerate(LENGTHS)]
    while unfinished := [run for run in batched if len(run.logits) < NUM_TOKENS]:
        model.step([(run, min(19, len(run.token_ids) - run.num_computed)) for run in unfinished], num_padding=3)
    for length, *runs in zip(LENGTHS, alone, batched, strict=True):
        tokens, logits = _expected(directory, length)
        for run in runs:
            assert run.token_ids == tokens, f"a prompt of {length}"
            assert (torch.stack(run.logits) - logits).abs().max() < MAX_LOGIT_ERROR, f"a prompt of {length}"


def test_hidden_states_of_all_rows_are_those_of_the_module(directory: Path) -> None:
    loaded = load_model(directory)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = _prompt(70)
    with torch.inference_mode():
        expected = reference.model(torch.tensor([prompt])).last_hidden_state[0]
    model = FusedModel(loaded, TorchOperations())
    with torch.inference_mode():
        hidden = model.forward.hidden_states(torch.tensor(prompt), device_batch([(0, 70, list(range(5)))]), torch.arange(70))
    assert (hidden - expected).abs().max() < 1e-4 * expected.abs().max()


def test_fused_weights_leave_no_second_copy_and_a_module_that_computes_the_same(directory: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval().requires_grad_(False)
    ids = torch.tensor([_prompt(30)])
    before = module(ids).logits
    kept = _own_memory(module)
    decoder = fuse_weights(describe_decoder(module))
    parts = [name for name, memory in kept.items() if memory() is None]
    assert len(parts) == (0 if hasattr(module.model.layers[0].mlp, "gate_up_proj") else 5 * len(decoder.layers))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in module.parameters() if each.dim() > 1}
    assert sum(storages.values()) == weight_bytes(decoder)
    assert {product.weights[0].untyped_storage().data_ptr() for layer in decoder.layers for product in products_of(layer)} <= set(storages)
    assert torch.equal(module(ids).logits, before)


def _own_memory(module: torch.nn.Module) -> dict[str, weakref.ref[object]]:
    """Moves each weight into memory of its own, of which one can tell when it is freed."""
    found: dict[str, weakref.ref[object]] = {}
    for name, parameter in module.named_parameters():
        array = parameter.detach().numpy().copy()
        parameter.data = torch.from_numpy(array)
        found[name] = weakref.ref(array)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_bfloat16_stays_near_float32(tmp_path: Path, family: str) -> None:
    """Design rule 3 (c): mean logprob error at most 0.05, same top token wherever float32's own gap is over 0.1."""
    directory = write_tiny_model(tmp_path, family, scale=0.05)
    exact, rounded = (_teacher_forced(FusedModel(load_model(directory, dtype), TorchOperations())) for dtype in ("float32", "bfloat16"))
    assert 0 < (exact - rounded).abs().mean() <= 0.05
    best = exact.topk(2)
    clear = best.values[:, 0] - best.values[:, 1] > 0.1
    assert clear.sum() > 20
    assert torch.equal(rounded.argmax(1)[clear], best.indices[clear, 0])


@torch.inference_mode()
def _teacher_forced(model: FusedModel) -> torch.Tensor:
    """Log probabilities of all tokens at each place of a prompt."""
    prompt = _prompt(120)
    hidden = model.forward.hidden_states(torch.tensor(prompt), device_batch([(0, 120, list(range(8)))]), torch.arange(120))
    assert hidden.dtype == model.pool.dtype
    return torch.log_softmax(torch.cat([model.forward.logits(rows).clone() for rows in torch.split(hidden, MAX_ROWS)]), -1)


@pytest.mark.parametrize("chunks", [[(0, 30), (7, 1)], [(29, 1), (7, 1)]])
def test_a_step_reads_no_tensor_on_the_host(tmp_path: Path, chunks: list[tuple[int, int]]) -> None:
    """On torch's device without data, where whatever needs a value fails."""
    loaded = load_model(write_tiny_model(tmp_path, "qwen3"))
    model = FusedModel(replace(loaded, module=loaded.module.to("meta")), TorchOperations())
    batch = device_batch([(first, count, [place, place + 1]) for place, (first, count) in enumerate(chunks)])
    tensors: dict[str, Any] = {field.name: value.to("meta") for field in fields(batch) if isinstance(value := getattr(batch, field.name), torch.Tensor)}
    ids, rows = (torch.zeros(size, dtype=torch.int64, device="meta") for size in (batch.num_tokens, 2))
    logits = model.forward.logits(model.forward.hidden_states(ids, replace(batch, **tensors), rows))
    assert (logits.shape, logits.device.type) == ((2, VOCAB_SIZE), "meta")
