"""Log probabilities of prompt tokens: against transformers' logits, and bit for bit against themselves in other cuts and batches."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from checks.tiny_models import VOCAB_SIZE
from engine.errors import SequenceError
from engine.sampling_params import SampledToken
from engine.step import Chunk, PromptRow
from engine.torch_device import TorchDevice
from tests.support.torch_steps import Driven, LogitsRecorder, execute, tiny_device

NUM_ALTERNATIVES = 3


def _prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def _asking(sequence: Driven, num_tokens: int) -> Chunk:
    """The sequence's next chunk, with what follows each of its tokens as far as the prompt goes."""
    chunk = sequence.chunk(num_tokens)
    following = sequence.token_ids[sequence.num_computed + 1 : sequence.num_computed + num_tokens + 1]
    sequence.num_computed += num_tokens
    return Chunk(chunk.seq_id, chunk.token_ids, chunk.first_position, chunk.block_table, chunk.samples, PromptRow(following, NUM_ALTERNATIVES))


def _alone(device: TorchDevice, prompt: list[int]) -> tuple[SampledToken, ...]:
    return execute(device, _asking(Driven("alone", prompt, tuple(range(20))), len(prompt))).prompt_logprobs[0]


@pytest.fixture(params=["tiny_llama", "tiny_qwen3"])
def model(request: pytest.FixtureRequest) -> Path:
    """Each family's tiny checkpoint."""
    path: Path = request.getfixturevalue(request.param)
    return path


def test_each_prompt_token_but_the_first_has_the_log_probability_of_transformers(model: Path, kernel_cache: Path) -> None:
    prompt = _prompt(150, seed=1)
    found = _alone(tiny_device(model, kernel_cache), prompt)
    with torch.inference_mode():
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        expected = torch.log_softmax(module(torch.tensor([prompt])).logits[0], -1)
    assert [token.token_id for token in found] == prompt[1:]
    for place, token in enumerate(found):
        assert token.logprob == pytest.approx(float(expected[place, token.token_id]), abs=1e-3)
        top = torch.topk(expected[place], NUM_ALTERNATIVES)
        assert [logprob for _, logprob in token.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-3)


def test_float32_values_have_the_same_bits_in_every_cut_and_batch(model: Path, kernel_cache: Path) -> None:
    prompt = _prompt(150, seed=2)
    alone = _alone(tiny_device(model, kernel_cache), prompt)
    device = tiny_device(model, kernel_cache)
    assert device.batch_invariant
    rng = random.Random(5)
    for attempt in range(3):
        subject, found = Driven("subject", prompt, tuple(range(30, 40))), list[SampledToken]()
        while subject.num_computed < len(prompt):
            size = min(rng.choice([1, 2, 17, 31, 65, 90]), len(prompt) - subject.num_computed)
            lengths = rng.choices([1, 5, 40, 203], k=rng.randrange(4))
            others = [Driven(f"other {place}", _prompt(length, place), tuple(range(60 + place * 13, 73 + place * 13))) for place, length in enumerate(lengths)]
            chunks = [_asking(other, len(other.token_ids)) if rng.random() < 0.5 else other.chunk(len(other.token_ids)) for other in others]
            place = rng.randrange(len(chunks) + 1)
            chunks.insert(place, _asking(subject, size))
            result = execute(device, *chunks)
            assert sorted(result.prompt_logprobs) == [index for index, chunk in enumerate(chunks) if chunk.prompt is not None]
            found.extend(result.prompt_logprobs[place])
        assert tuple(found) == alone, f"attempt {attempt}"


def test_the_logits_of_a_long_prompt_are_never_in_memory_at_once(tiny_llama: Path, kernel_cache: Path) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    recorder = LogitsRecorder(device)
    _alone(device, _prompt(200, seed=3))
    assert max(recorder.sizes) <= 64
    assert sum(recorder.sizes) == 200, "199 tokens of the prompt and one sample"


def test_a_prompt_with_unusable_logits_or_an_unknown_token_fails_alone(tiny_llama: Path, kernel_cache: Path) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    poisoned, unknown, good = (Driven(name, _prompt(20, seed=4), (place, place + 1)) for name, place in (("poisoned", 3), ("unknown", 5), ("good", 7)))
    device._blocks[3] = 0xFF  # NaN in every element of a block that the sequence reads
    poisoned.num_computed = 16
    beyond = Chunk("unknown", unknown.token_ids[:4], 0, unknown.block_table, (), PromptRow([1, 2, 3, VOCAB_SIZE], 0))
    result = execute(device, _asking(poisoned, 4), beyond, _asking(good, 20))
    assert sorted(result.failed) == [0, 1]
    assert all(isinstance(error, SequenceError) for error in result.failed.values())
    assert [len(tokens) for tokens in result.sampled] == [0, 0, 1]
    assert list(result.prompt_logprobs) == [2]
    assert result.prompt_logprobs[2] == _alone(tiny_device(tiny_llama, kernel_cache), good.token_ids)


def test_a_prompt_that_failed_is_not_sampled_from(tiny_llama: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    recorder = LogitsRecorder(device)
    sound = recorder.logits
    monkeypatch.setattr(recorder, "logits", lambda hidden: sound(hidden) * (torch.nan if len(hidden) == 19 else 1.0))
    failing, good = (Driven(name, _prompt(20, seed=4), (place, place + 1)) for name, place in (("failing", 3), ("good", 7)))
    result = execute(device, _asking(failing, 20), good.chunk(20))
    assert list(result.failed) == [0]
    assert [len(tokens) for tokens in result.sampled] == [0, 1]


def test_a_chunk_may_ask_for_fewer_than_its_tokens_or_for_none(tiny_llama: Path, kernel_cache: Path) -> None:
    device = tiny_device(tiny_llama, kernel_cache)
    prompt = _prompt(20, seed=6)
    none, some = (Chunk("a", prompt, 0, (place, place + 1), (), PromptRow(targets, 0)) for place, targets in ((1, []), (3, prompt[1:6])))
    result = execute(device, none, some)
    assert [len(result.prompt_logprobs[index]) for index in (0, 1)] == [0, 5]
    assert all(token.top_logprobs == () for token in result.prompt_logprobs[1])
