"""Paged attention against a float64 reference, and bit for bit against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention import AttentionBackend, Scores, TorchAttention, attend_causal
from engine.kernels.build import KernelBuildError, build_shared_library
from engine.kernels.native import SOURCE, NativeAttention
from tests.support.torch_steps import packed_batch

NUM_BLOCKS, NUM_LAYERS, LAYER = 64, 3, 1
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Largest error of an output element, for values of magnitude 1: rounding of the output (half an ulp at 2) and, in float32, of the sums."""


def _pool(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Full of NaN: a slot that is read before it is written shows."""
    return torch.full((NUM_BLOCKS, NUM_LAYERS, 2, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)


def _native(pool: torch.Tensor, num_heads: int, kernel_cache: Path, num_threads: int = 1) -> NativeAttention:
    return NativeAttention(pool, num_heads, num_threads, kernel_cache, "c++")


def _run(
    backend: AttentionBackend, chunks: list[tuple[int, int, list[int]]], qkv: list[torch.Tensor], window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    out = torch.zeros_like(qkv[0])
    backend.begin(packed_batch(chunks))
    query, key, value = qkv
    backend.attend(LAYER, query, key, value, out, Scores(query.shape[-1] ** -0.5, window, softcap))
    return out


def _random_qkv(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_tokens, heads, head_dim, generator=generator).to(dtype) for heads in (num_heads, num_kv_heads, num_kv_heads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (6, 2, 32, 8), (4, 4, 80, 32), (16, 1, 128, 16), (40, 1, 16, 16)]
)
@pytest.mark.parametrize("name", ["native", "torch"])
def test_output_is_near_the_float64_reference(
    kernel_cache: Path, name: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    pool = _pool(block_size, num_kv_heads, head_dim, dtype)
    backend = _native(pool, num_heads, kernel_cache) if name == "native" else TorchAttention(pool)
    num_tokens = 203
    qkv = _random_qkv(num_tokens, num_heads, num_kv_heads, head_dim, dtype)
    table = torch.randperm(NUM_BLOCKS)[: -(-num_tokens // block_size)].tolist()
    out = _run(backend, [(0, num_tokens, table)], qkv)
    query, keys, values = (tensor.double() for tensor in qkv)
    expected = attend_causal(query, keys, values, 0, Scores(head_dim**-0.5))
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * values.abs().max()
    assert pool[:, [layer for layer in range(NUM_LAYERS) if layer != LAYER]].isnan().all(), "another layer was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (24, None), (64, None), (65, 2.0), (150, 30.0), (500, None), (None, 0.5)])
@pytest.mark.parametrize("name", ["native", "torch"])
def test_windows_and_soft_caps_are_those_of_the_float64_reference(
    kernel_cache: Path, name: str, dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    pool = _pool(16, 2, 32, dtype)
    backend = _native(pool, 6, kernel_cache) if name == "native" else TorchAttention(pool)
    qkv = _random_qkv(203, 6, 2, 32, dtype)
    out = _run(backend, [(0, 203, list(range(13)))], qkv, window, softcap)
    query, keys, values = (tensor.double() for tensor in qkv)
    scores = torch.einsum("thd,phd->htp", query, keys.repeat_interleave(3, 1)) * 32**-0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    hidden = [[key > place or key <= place - (window or 203) for key in range(203)] for place in range(203)]
    weights = torch.softmax(scores.masked_fill(torch.tensor(hidden), -torch.inf), -1)
    expected = torch.einsum("htp,phd->thd", weights, values.repeat_interleave(3, 1))
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * values.abs().max()


@pytest.mark.parametrize("name", ["native", "torch"])
@pytest.mark.parametrize("window", [1, 24, 64, 100])
def test_a_window_reads_no_key_outside_it(kernel_cache: Path, name: str, window: int) -> None:
    """Keys outside are NaN in the pool, and their blocks are those of nobody."""
    outputs = []
    for spoil in (False, True):
        pool = _pool(16, 2, 32, torch.float32)
        backend = _native(pool, 6, kernel_cache) if name == "native" else TorchAttention(pool)
        table = list(range(13))
        qkv = _random_qkv(203, 6, 2, 32, torch.float32)
        _run(backend, [(0, 200, table)], [tensor[:200] for tensor in qkv], window)
        first_seen = 200 - window + 1
        if spoil:
            for slot in range(first_seen):
                pool[table[slot // 16], LAYER, :, slot % 16] = torch.nan
        outputs.append(_run(backend, [(200, 3, table)], [tensor[200:] for tensor in qkv], window))
    assert outputs[0].isfinite().all()
    assert torch.equal(*outputs)


@pytest.mark.parametrize("window", [5, 24, 64, 90])
@pytest.mark.parametrize("cut", [[1] * 203, [7, 64, 1, 100, 31], [202, 1]])
def test_native_bits_within_a_window_do_not_depend_on_the_cut_into_chunks(kernel_cache: Path, window: int, cut: list[int]) -> None:
    qkv = _random_qkv(203, 9, 3, 64, torch.float32)
    table = list(range(20, 33))
    whole = _run(_native(_pool(16, 3, 64, torch.float32), 9, kernel_cache), [(0, 203, table)], qkv, window, 20.0)
    backend = _native(_pool(16, 3, 64, torch.float32), 9, kernel_cache)
    parts, first = [], 0
    for size in cut:
        parts.append(_run(backend, [(first, size, table)], [tensor[first : first + size] for tensor in qkv], window, 20.0))
        first += size
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [[1] * 203, [7, 64, 1, 100, 31], [16] * 12 + [11], [202, 1]])
def test_native_bits_do_not_depend_on_the_cut_into_chunks(kernel_cache: Path, dtype: torch.dtype, cut: list[int]) -> None:
    qkv = _random_qkv(203, 9, 3, 64, dtype)
    table = list(range(20, 33))
    whole = _run(_native(_pool(16, 3, 64, dtype), 9, kernel_cache), [(0, 203, table)], qkv)
    backend = _native(_pool(16, 3, 64, dtype), 9, kernel_cache)
    parts, first = [], 0
    for size in cut:
        parts.append(_run(backend, [(first, size, table)], [tensor[first : first + size] for tensor in qkv]))
        first += size
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_native_bits_do_not_depend_on_batch_order_blocks_or_threads(kernel_cache: Path, num_threads: int) -> None:
    lengths = [1, 40, 203, 65]
    alone, inputs = [], []
    for seed, length in enumerate(lengths):
        inputs.append(_random_qkv(length, 6, 2, 32, torch.float32, seed))
        alone.append(_run(_native(_pool(16, 2, 32, torch.float32), 6, kernel_cache), [(0, length, list(range(13)))], inputs[-1]))
    order = [2, 0, 3, 1]
    tables = {index: [index * 13 + place for place in reversed(range(13))] for index in order}
    backend = _native(_pool(16, 2, 32, torch.float32), 6, kernel_cache, num_threads)
    together = _run(
        backend, [(0, lengths[index], tables[index]) for index in order], [torch.cat([inputs[index][part] for index in order]) for part in range(3)]
    )
    start = 0
    for index in order:
        assert torch.equal(together[start : start + lengths[index]], alone[index])
        start += lengths[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_another_size_leaves_nothing_to_the_next_one(kernel_cache: Path, dtype: torch.dtype) -> None:
    """Heads of 16 elements are filled up to as many as heads of 32 have."""
    qkv = _random_qkv(40, 6, 2, 16, dtype)
    before = _run(_native(_pool(16, 2, 16, dtype), 6, kernel_cache), [(0, 40, [0, 1, 2])], qkv)
    _run(_native(_pool(16, 2, 32, dtype), 6, kernel_cache), [(0, 40, [0, 1, 2])], _random_qkv(40, 6, 2, 32, dtype))
    assert torch.equal(_run(_native(_pool(16, 2, 16, dtype), 6, kernel_cache), [(0, 40, [0, 1, 2])], qkv), before)


def test_a_broken_later_token_leaves_earlier_ones_alone(kernel_cache: Path) -> None:
    qkv = _random_qkv(40, 6, 2, 32, torch.float32)
    clean = _run(_native(_pool(16, 2, 32, torch.float32), 6, kernel_cache), [(0, 40, [0, 1, 2])], qkv)
    qkv[1][37], qkv[2][37] = torch.nan, torch.inf
    dirty = _run(_native(_pool(16, 2, 32, torch.float32), 6, kernel_cache), [(0, 40, [0, 1, 2])], qkv)
    assert torch.equal(dirty[:37], clean[:37])
    assert dirty[37:].isnan().all(), "a token that sees NaN must show it"


def test_padding_rows_write_no_kv(kernel_cache: Path) -> None:
    pool = _pool(16, 2, 32, torch.float32)
    out = _run(_native(pool, 6, kernel_cache), [(0, 5, [3])], _random_qkv(16, 6, 2, 32, torch.float32))
    assert out[5:].eq(0).all()
    written = ~pool.isnan()
    assert written[3, LAYER, :, :5].all()
    assert written.sum() == 2 * 5 * 2 * 32


def test_native_without_a_compiler_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler 'no-such-compiler'.*attention_backend"):
        NativeAttention(_pool(16, 2, 32, torch.float32), 6, 1, tmp_path, "no-such-compiler")


def test_a_kernel_is_compiled_once(kernel_cache: Path) -> None:
    first = build_shared_library(SOURCE, kernel_cache, "c++")
    changed = first.stat().st_mtime_ns
    assert build_shared_library(SOURCE, kernel_cache, "c++") == first
    assert first.stat().st_mtime_ns == changed
    assert all(path.suffix == ".so" for path in first.parent.iterdir()), "a scratch directory was left"


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(KernelBuildError, match="others may write"):
        build_shared_library(SOURCE, tmp_path, "c++")


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelBuildError, match=r"file/kernels: Not a directory: set cache_dir"):
        build_shared_library(SOURCE, tmp_path / "file", "c++")
