"""The native decoder: as near to float64 as transformers' own module, and the same bits however a step is put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from checks.tiny_models import write_tiny_model
from engine.attention import PackedBatch
from engine.config import Dtype
from engine.describe import describe_decoder
from engine.kernels.isa import ISAS, Isa, name_of, runs_here
from engine.kernels.native_decoder import NativeDecoder
from engine.model import LoadedModel, load_model

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3")
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
OTHER_ISAS = [isa for isa in ISAS if isa != "native" and isa != name_of("native") and runs_here(isa)]
NUM_TOKENS = 150
"""More than two windows of the tiny models, and two tiles of keys and a half."""


def random_tokens(model: LoadedModel, count: int = NUM_TOKENS, seed: int = 1) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, model.vocab_size, count).astype(np.int32)


@dataclass
class Driver:
    """A decoder over a pool that is NaN wherever nothing was written, which gives a part of it to each sequence, its blocks in no order."""

    model: LoadedModel
    decoder: NativeDecoder
    block_size: int = 16
    tables: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = self.model
        shape = (16 * -(-NUM_TOKENS // self.block_size), model.num_layers, 2, self.block_size, model.num_kv_heads, model.head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=model.dtype)
        self.free = list(np.random.default_rng(7).permutation(len(self.pool)))

    def step(self, chunks: Sequence[tuple[str, int, npt.NDArray[np.int32]]], rows: Sequence[int] | None = None) -> torch.Tensor:
        """Hidden states of `rows`, or of all tokens, of chunks (sequence, first position, tokens)."""
        tables = []
        for name, first, tokens in chunks:
            if name not in self.tables:
                self.tables[name] = np.array([self.free.pop() for _ in range(-(-NUM_TOKENS // self.block_size))], np.int32)
            table = self.tables[name]
            tables.append(table[: -(-(first + len(tokens)) // self.block_size)])
        batch = PackedBatch(
            np.cumsum([0, *(len(tokens) for _, _, tokens in chunks)]).astype(np.int32),
            np.array([first for _, first, _ in chunks], np.int32),
            np.cumsum([0, *(len(table) for table in tables[:-1])]).astype(np.int32),
            np.concatenate(tables),
        )
        wanted = range(batch.num_tokens) if rows is None else rows
        return self.decoder.step(np.concatenate([tokens for _, _, tokens in chunks]), batch, np.array(wanted, np.int32), self.pool)

    def logits(self, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
        logits = self.decoder.head(self.step([("alone", 0, tokens)]))
        cap = self.model.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def made(tmp_path: Path, kernel_cache: Path, family: str, dtype: Dtype, *, isa: Isa = "native", num_threads: int = 2, **overrides: Any) -> Driver:
    model = load_model(write_tiny_model(tmp_path / "model", family, **overrides), dtype, "cpu")
    return Driver(model, NativeDecoder(describe_decoder(model.module), num_threads, kernel_cache, "c++", isa))


def assert_near_float64(driver: Driver, path: Path) -> None:
    """Largest error of a logit: rounding of sums in float32; in shorter types no more than what transformers' module in that type makes."""
    tokens = random_tokens(driver.model)
    inputs = torch.from_numpy(tokens[None].astype(np.int64))
    module = AutoModelForCausalLM.from_pretrained(path, dtype=driver.model.dtype)
    with torch.no_grad():
        its_own = module(inputs).logits[0].double()
        exact = module.double()(inputs).logits[0]
    error = (driver.logits(tokens).double() - exact).abs()
    if driver.model.dtype == torch.float32:
        assert error.max() < 1e-5 * exact.abs().max()
    else:
        its_error = (its_own - exact).abs()
        assert error.max() < 1.2 * its_error.max()
        assert error.mean() < 1.1 * its_error.mean()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_to_float64_as_transformers(tmp_path: Path, kernel_cache: Path, family: str, dtype: Dtype) -> None:
    assert_near_float64(made(tmp_path, kernel_cache, family, dtype), tmp_path / "model")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", OTHER_ISAS)
def test_code_for_other_instructions_is_as_near(tmp_path: Path, kernel_cache: Path, isa: Isa, dtype: Dtype) -> None:
    driver = made(tmp_path, kernel_cache, "gemma3_text", dtype, isa=isa)
    assert driver.decoder.isa == isa
    assert_near_float64(driver, tmp_path / "model")
    assert_same_bits(driver)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 72, "intermediate_size": 104, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 48},
        {"hidden_size": 64, "intermediate_size": 90, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": False},
        {"hidden_size": 80, "num_attention_heads": 20, "num_key_value_heads": 1, "head_dim": 128},
        {"hidden_size": 80, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 80, "attention_bias": True},
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32},
    ],
    ids=["odd", "one KV head", "more rows than a tile", "bias", "groups of three"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_need_not_fit_the_kernels_vectors(tmp_path: Path, kernel_cache: Path, dtype: Dtype, sizes: dict[str, Any]) -> None:
    driver = made(tmp_path, kernel_cache, "llama", dtype, **sizes)
    assert_near_float64(driver, tmp_path / "model")
    assert_same_bits(driver)


def assert_same_bits(driver: Driver) -> None:
    """One sequence in one step, token by token, in odd cuts, and beside others."""
    tokens, others = random_tokens(driver.model), [random_tokens(driver.model, count, seed=count) for count in (5, 1, 40)]
    whole = driver.step([("whole", 0, tokens)])
    assert whole.isfinite().all()
    for name, cuts in {"singly": [1] * NUM_TOKENS, "cut": [1] * 20 + [7, 33, 40, 50]}.items():
        ends = np.cumsum(cuts)
        parts = [driver.step([(name, end - count, tokens[end - count : end])]) for end, count in zip(ends.tolist(), cuts, strict=True)]
        assert torch.equal(torch.cat(parts), whole), name
    driver.step([(f"other {index}", 0, other[:-1]) for index, other in enumerate(others) if len(other) > 1])
    beside = [(f"other {index}", len(other) - 1, other[-1:]) for index, other in enumerate(others)]
    together = driver.step([*beside[:2], ("beside", 0, tokens[:64]), *beside[2:]])
    later = driver.step([*beside, ("beside", 64, tokens[64:])])
    assert torch.equal(torch.cat([together[2:66], later[3:]]), whole)
    assert torch.equal(later[:3], torch.cat([together[:2], together[-1:]])), "a token computed again is the same"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_how_a_step_is_put_together(tmp_path: Path, kernel_cache: Path, family: str, dtype: Dtype) -> None:
    assert_same_bits(made(tmp_path, kernel_cache, family, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 32])
def test_bits_do_not_depend_on_the_size_of_blocks(tmp_path: Path, kernel_cache: Path, dtype: Dtype, block_size: int) -> None:
    driver = made(tmp_path, kernel_cache, "mistral", dtype)
    other = Driver(driver.model, driver.decoder, block_size)
    tokens = random_tokens(driver.model)
    assert torch.equal(driver.step([("a", 0, tokens)]), other.step([("a", 0, tokens)]))
    assert_same_bits(other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_steps_have_the_bits_of_short_ones_with_any_number_of_threads(tmp_path: Path, kernel_cache: Path, dtype: Dtype) -> None:
    """Where a step has many rows each thread has its own."""
    alone = made(tmp_path, kernel_cache, "llama", dtype, num_threads=1)
    tokens = [random_tokens(alone.model, 150, seed=seed) for seed in range(5)]
    expected = torch.cat([alone.step([(str(index), 0, each)]) for index, each in enumerate(tokens)])
    for num_threads in (1, 2, 3):
        driver = Driver(alone.model, NativeDecoder(describe_decoder(alone.model.module), num_threads, kernel_cache, "c++"))
        assert torch.equal(driver.step([(str(index), 0, each) for index, each in enumerate(tokens)]), expected)


def test_only_the_rows_that_are_asked_for_come_back(tmp_path: Path, kernel_cache: Path) -> None:
    driver = made(tmp_path, kernel_cache, "qwen3", "bfloat16")
    tokens = random_tokens(driver.model)
    whole = driver.step([("a", 0, tokens)])
    for rows in ([149], [0], [3, 4, 90, 149]):
        assert torch.equal(driver.step([("a", 0, tokens)], rows), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_sequence_breaks_no_other(tmp_path: Path, kernel_cache: Path, dtype: Dtype) -> None:
    driver = made(tmp_path, kernel_cache, "llama", dtype)
    one, other = random_tokens(driver.model, 70, seed=1), random_tokens(driver.model, 70, seed=2)
    clean = driver.step([("one", 0, one)])
    driver.step([("broken", 0, other)])
    driver.pool[driver.tables["broken"][1]] = torch.nan
    both = driver.step([("broken", 69, other[-1:]), ("beside", 0, one)])
    assert both[0].isnan().all() and torch.equal(both[1:], clean)
    driver.tables["next"] = driver.tables["broken"]
    assert torch.equal(driver.step([("next", 0, one)]), clean), "what a block held before is not looked at"
    assert torch.equal(torch.cat([driver.step([("next", place, one[place : place + 1])]) for place in range(70)]), clean)
