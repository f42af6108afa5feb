"""Every architecture against transformers' own generate, and bit for bit against itself."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checks.one_engine import Prompt, Setup, run_engine
from checks.tiny_models import FAMILIES, VOCAB_SIZE, WINDOW, write_tiny_model
from engine.config import AttentionBackendName
from engine.model import LoadedModel, load_model
from tests.support.packed_runs import PackedModel, Run

NUM_TOKENS = 10
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 70, 150)
MAX_LOGIT_ERROR = 1e-4


@dataclass(frozen=True)
class Family:
    """One architecture: its checkpoint, the engine's model of it and transformers'."""

    directory: Path
    model: LoadedModel
    reference: Any

    @cache  # noqa: B019  (one instance per session)
    def expected(self, length: int) -> tuple[list[int], torch.Tensor]:
        """All tokens of a greedy continuation of `prompt(length)` and its logits, [NUM_TOKENS, vocabulary]."""
        ids = torch.tensor([prompt(length)])
        output = self.reference.generate(
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


def prompt(length: int) -> list[int]:
    """The same for the same length."""
    generator = random.Random(length)
    return [generator.randrange(3, VOCAB_SIZE) for _ in range(length)]


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    directory = write_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return Family(directory, load_model(directory), reference.eval())


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_tokens_and_logits_are_those_of_transformers(family: Family, kernel_cache: Path, backend: AttentionBackendName) -> None:
    packed = PackedModel(family.model, kernel_cache, backend)
    for length in LENGTHS:
        run = Run(prompt(length), list(range(3, 20)))
        packed.generate(run, NUM_TOKENS)
        tokens, logits = family.expected(length)
        assert run.token_ids == tokens, f"a prompt of {length}"
        assert (torch.stack(run.logits) - logits).abs().max() < MAX_LOGIT_ERROR, f"a prompt of {length}"


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_batched_and_chunked_tokens_are_those_of_transformers(family: Family, kernel_cache: Path, backend: AttentionBackendName) -> None:
    packed = PackedModel(family.model, kernel_cache, backend)
    runs = [Run(prompt(length), list(range(12 * place, 12 * place + 12))) for place, length in enumerate(LENGTHS)]
    while unfinished := [run for run in runs if len(run.logits) < NUM_TOKENS]:
        packed.step([(run, min(19, len(run.token_ids) - run.num_computed)) for run in unfinished])
    for run, length in zip(runs, LENGTHS, strict=True):
        tokens, logits = family.expected(length)
        assert run.token_ids == tokens, f"a prompt of {length}"
        assert (torch.stack(run.logits) - logits).abs().max() < MAX_LOGIT_ERROR, f"a prompt of {length}"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_logits_have_the_same_bits_alone_batched_and_chunked(family: Family, kernel_cache: Path, num_threads: int) -> None:
    assert family.model.steady
    alone = Run(prompt(70), list(range(12)))
    PackedModel(family.model, kernel_cache).generate(alone, NUM_TOKENS)
    generator = random.Random(7)
    torch.set_num_threads(num_threads)
    try:
        packed = PackedModel(family.model, kernel_cache, num_threads=num_threads)
        subject = Run(prompt(70), list(range(50, 62)))
        while len(subject.logits) < NUM_TOKENS:
            size = min(generator.choice([1, 2, 17, 31]), len(subject.token_ids) - subject.num_computed)
            lengths = generator.choices([1, 5, 40, 150], k=generator.randrange(5))
            others = [(Run(prompt(length), list(range(70 + place * 10, 80 + place * 10))), length) for place, length in enumerate(lengths)]
            work = [*others, (subject, size)]
            generator.shuffle(work)
            packed.step(work)
    finally:
        torch.set_num_threads(1)
    for place, (own, batched) in enumerate(zip(alone.logits, subject.logits, strict=True)):
        assert torch.equal(own, batched), f"token {place} of the output"


@pytest.mark.parametrize("backend", ["native", "torch"])
async def test_preempted_sequences_and_prefix_hits_give_the_same_tokens(family: Family, kernel_cache: Path, backend: AttentionBackendName) -> None:
    asked = [Prompt(tuple(prompt(length)), NUM_TOKENS) for length in LENGTHS]
    expected = [family.expected(length)[0][length:] for length in LENGTHS]
    options = {"attention_backend": backend, "cache_dir": kernel_cache, "num_threads": 1, "max_num_batched_tokens": 128, "max_prefill_tokens_per_step": 64}
    tight = await run_engine(family.directory, asked, Setup("preempted", {**options, "num_blocks": 22, "max_model_len": 160, "reserve_output_tokens": 1}))
    assert tight.num_preemptions > 0
    assert tight.outputs == expected
    repeated = await run_engine(family.directory, asked, Setup("prefix hits", {**options, "enable_prefix_caching": True}, rounds=2))
    assert repeated.num_cached_tokens >= 9 * 16
    assert repeated.outputs == expected


def test_a_model_in_bfloat16_says_that_it_is_not_steady(family: Family) -> None:
    loaded = load_model(family.directory, "bfloat16")
    assert not loaded.steady
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_configured_cap_on_gemmas_scores_is_kept(tmp_path: Path, kernel_cache: Path, backend: AttentionBackendName) -> None:
    """transformers' Gemma 3 reads the field and has an attention that takes a cap, but passes none on; given one, it says what ours must."""
    directory = write_tiny_model(tmp_path, "gemma3_text", attn_logit_softcapping=1.5)
    run = Run(prompt(70), list(range(12)))
    PackedModel(load_model(directory), kernel_cache, backend).generate(run, 1)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        capped, free = (reference(torch.tensor([prompt(70)]), **kwargs).logits[0, -1] for kwargs in ({"softcap": 1.5}, {}))
    assert (run.logits[0] - capped).abs().max() < MAX_LOGIT_ERROR
    assert (free - capped).abs().max() > 100 * MAX_LOGIT_ERROR, "the cap changes nothing"


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rope_is_that_of_transformers(tmp_path: Path, kernel_cache: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    directory = write_tiny_model(tmp_path, rope_parameters=rope)
    run = Run(prompt(150), list(range(12)))
    PackedModel(load_model(directory), kernel_cache).generate(run, 1)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt(150)])).logits[0, -1]
    assert (run.logits[0] - expected).abs().max() < MAX_LOGIT_ERROR
