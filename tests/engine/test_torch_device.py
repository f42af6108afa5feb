"""The torch device against transformers' own generate, and bit for bit against itself in other batches, cuts and orders."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from checks.tiny_models import VOCAB_SIZE, write_tiny_model
from engine.build import build_torch_engine_parts
from engine.config import AttentionBackendName, Dtype, EngineConfig
from engine.errors import SequenceError
from engine.model import load_model
from engine.sampling_params import SampledToken, SamplingParams
from engine.step import Chunk, SampleRow
from tests.support.torch_steps import GREEDY, Driven, LogitsRecorder, execute, generate, step, tiny_device


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def _reference(model: Path, prompt: list[int], num_tokens: int) -> list[int]:
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    output = module.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return list(output[0, len(prompt) :].tolist())


@pytest.fixture(params=["tiny_llama", "tiny_qwen3"])
def model(request: pytest.FixtureRequest) -> Path:
    """Each family's tiny checkpoint."""
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_greedy_output_equals_transformers_alone_and_chunked(model: Path, kernel_cache: Path, backend: AttentionBackendName) -> None:
    device = tiny_device(model, kernel_cache, backend=backend)
    assert device.attention_backend == backend
    prompt = _prompt(77, seed=1)
    expected = _reference(model, prompt, 24)
    assert generate(device, Driven("alone", list(prompt), tuple(range(5, 12))), 24) == expected
    assert generate(device, Driven("chunked", list(prompt), tuple(range(40, 47))), 24, chunk=13) == expected


def test_greedy_output_equals_transformers_when_batched(model: Path, kernel_cache: Path) -> None:
    device = tiny_device(model, kernel_cache)
    prompts = [_prompt(length, seed=length) for length in (3, 33, 90)]
    sequences = [Driven(str(index), list(prompt), tuple(range(index * 8, index * 8 + 8))) for index, prompt in enumerate(prompts)]
    step(device, [(sequences[0], 3), (sequences[2], 50)])
    step(device, [(sequences[2], 40), (sequences[0], 1), (sequences[1], 20)])
    step(device, [(sequences[1], 13), (sequences[0], 1), (sequences[2], 1)])
    while any(len(sequence.sampled) < 12 for sequence in sequences):
        step(device, [(sequence, 1) for sequence in sequences])
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert [token.token_id for token in sequence.sampled][:12] == _reference(model, prompt, 12)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_float32_logits_have_the_same_bits_in_every_batch_cut_and_order(model: Path, kernel_cache: Path, num_threads: int) -> None:
    prompt = _prompt(150, seed=3)
    device = tiny_device(model, kernel_cache)
    assert device.batch_invariant
    recorder = LogitsRecorder(device)
    generate(device, Driven("alone", list(prompt), tuple(range(10))), 6)
    alone = recorder.rows

    device = tiny_device(model, kernel_cache, num_threads=num_threads)
    recorder = LogitsRecorder(device)
    rng = random.Random(num_threads)
    subject = Driven("subject", list(prompt), tuple(range(30, 40)))
    rows: list[torch.Tensor] = []
    while len(rows) < 6:
        size = min(rng.choice([1, 2, 17, 31, 49]), len(subject.token_ids) - subject.num_computed)
        others = [
            (Driven(f"other {place}", _prompt(length, rng.randrange(99)), tuple(range(60 + place * 13, 73 + place * 13))), length)
            for place, length in enumerate(rng.choices([1, 5, 40, 203], k=rng.randrange(4)))
        ]
        work = [*others, (subject, size)]
        rng.shuffle(work)
        recorder.rows.clear()
        step(device, work)
        if subject.sampled and len(subject.sampled) > len(rows):
            asked = [sequence for sequence, _ in work]
            rows.append(recorder.rows[asked.index(subject)])
    torch.set_num_threads(1)
    for place, (own, batched) in enumerate(zip(alone, rows, strict=True)):
        assert torch.equal(own, batched), f"token {place} of the output"


def test_float32_activations_round_alike_at_every_place_of_a_tensor(tiny_llama: Path) -> None:
    activation = load_model(tiny_llama).module.model.layers[0].mlp.act_fn
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(0)) * 4
    whole = activation(values)
    parts = torch.cat([activation(part) for part in torch.split(values, 31)])
    assert torch.equal(whole, parts)
    assert not torch.equal(torch.nn.functional.silu(values), torch.cat([torch.nn.functional.silu(part) for part in torch.split(values, 31)])), (
        "torch's own is steady"
    )
    assert torch.allclose(whole, torch.nn.functional.silu(values), rtol=1e-6)


def test_a_shared_prefix_is_read_through_the_block_table(model: Path, kernel_cache: Path) -> None:
    device = tiny_device(model, kernel_cache)
    prefix, tail = _prompt(48, seed=5), _prompt(20, seed=6)
    generate(device, Driven("first", prefix + _prompt(9, seed=7), (50, 51, 52, 53)), 1)
    reader = Driven("second", prefix + tail, (50, 51, 52, 60, 61, 62), num_computed=48)
    assert generate(device, reader, 10) == _reference(model, prefix + tail, 10)


def test_block_copies_come_before_the_forward(model: Path, kernel_cache: Path) -> None:
    device = tiny_device(model, kernel_cache)
    prompt = _prompt(32, seed=8)
    generate(device, Driven("first", list(prompt), (1, 2)), 1)
    copied = Driven("copy", list(prompt), (1, 9, 10), num_computed=31)
    result = execute(device, copied.chunk(1), copies=[(2, 9)])
    assert [token.token_id for token in result.sampled[0]] == _reference(model, prompt, 1)


def test_a_bad_chunk_fails_alone(tiny_llama: Path, kernel_cache: Path) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    good = Driven("good", _prompt(20, seed=9), (3, 4, 5))
    chunks = [
        Chunk("bad token", [5, VOCAB_SIZE], 0, (7,)),
        good.chunk(20),
        Chunk("beyond the model", [5], 512, tuple(range(64))),
        Chunk("empty", [], 0, (8,)),
    ]
    result = execute(device, *chunks)
    assert sorted(result.failed) == [0, 2, 3]
    assert all(isinstance(error, SequenceError) for error in result.failed.values())
    assert [token.token_id for token in result.sampled[1]] == _reference(tiny_llama, good.token_ids, 1)
    assert [result.sampled[index] for index in (0, 2, 3)] == [()] * 3


def test_non_finite_logits_fail_their_sequence_only(tiny_llama: Path, kernel_cache: Path) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    poisoned = Driven("poisoned", _prompt(20, seed=10), (3, 4))
    good = Driven("good", _prompt(20, seed=9), (5, 6))
    generate(device, Driven("poisoned", list(poisoned.token_ids), (3, 4)), 1)
    device._blocks[3] = 0xFF  # NaN in every element of a block that the sequence reads
    poisoned.num_computed = 19
    result = execute(device, poisoned.chunk(1), good.chunk(20))
    assert list(result.failed) == [0]
    assert "not finite at position 20" in str(result.failed[0])
    assert [len(tokens) for tokens in result.sampled] == [0, 1]


@pytest.mark.parametrize(("table", "match"), [((128,), "not all in a pool of 128"), ((3,), "table of 1")])
def test_a_broken_block_table_raises(tiny_llama: Path, kernel_cache: Path, table: tuple[int, ...], match: str) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    with pytest.raises(IndexError, match=match):
        execute(device, Chunk("a", [5] * (17 if table == (3,) else 2), 0, table))


def test_a_resumed_sequence_samples_as_the_uninterrupted_one(tiny_llama: Path, kernel_cache: Path) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    params = SamplingParams(max_tokens=64, temperature=1.0, seed=17)
    prompt = _prompt(21, seed=11)
    whole = generate(device, Driven("whole", list(prompt), (1, 2, 3), params), 12)
    resumed = generate(device, Driven("resumed", prompt + whole[:5], (11, 12, 13), params), 7, chunk=9)
    assert resumed == whole[5:]
    assert generate(device, Driven("other seed", list(prompt), (21, 22, 23), replace(params, seed=18)), 12) != whole


def test_bfloat16_stays_near_float32(tmp_path: Path, kernel_cache: Path) -> None:
    """Design rule 3 (c): teacher-forced logprob error at most 0.05 here, same top token wherever float32's own gap is over 0.1."""
    model = write_tiny_model(tmp_path, "llama", scale=0.05)
    prompt = _prompt(120, seed=12)
    params = replace(GREEDY, logprobs=VOCAB_SIZE)
    tokens: list[list[SampledToken]] = []
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        device = tiny_device(model, kernel_cache, dtype=dtype)
        assert (device.forward, device.batch_invariant) == ("native", True)
        chunks = [Chunk("a", [token_id], place, tuple(range(8)), (SampleRow(params, place + 1, prompt, 120),)) for place, token_id in enumerate(prompt)]
        tokens.append([token for chunk in chunks for token in execute(device, chunk).sampled[0]])
    for reference, token in zip(*tokens, strict=True):
        logprobs = dict(token.top_logprobs)
        assert max(abs(logprobs[token_id] - logprob) for token_id, logprob in reference.top_logprobs) <= 0.05
        if reference.top_logprobs[0][1] - reference.top_logprobs[1][1] > 0.1:
            assert token.token_id == reference.token_id


def test_facts_come_from_the_checkpoint(tiny_llama: Path, kernel_cache: Path) -> None:
    facts, kv_cache, _ = build_torch_engine_parts(EngineConfig(tiny_llama, num_blocks=20, cache_dir=kernel_cache, num_threads=1))
    assert (facts.name, facts.vocab_size, facts.eos_token_ids, facts.max_model_len) == (tiny_llama.name, VOCAB_SIZE, frozenset({2}), 320)
    assert (facts.layout.dtype, facts.layout.num_layers, facts.layout.num_kv_heads, facts.layout.head_dim, facts.layout.block_size) == ("float32", 3, 2, 16, 16)
    assert kv_cache.num_blocks == 20


def test_auto_without_a_compiler_says_that_it_runs_on_torch(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(tiny_llama, num_blocks=8, max_model_len=64, compiler="no-such-compiler", num_threads=1)
    device = build_torch_engine_parts(config)[2]
    assert (device.attention_backend, device.batch_invariant) == ("torch", False)
    assert "no C++ compiler 'no-such-compiler' (install one, for instance the package g++): attention runs on torch" in caplog.text
