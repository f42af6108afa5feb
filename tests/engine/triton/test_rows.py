"""Norms, rotation and gates against float64, over rows that lie apart and sizes that are no powers of two."""

from __future__ import annotations

import pytest
import torch

from engine.decoder import Activation
from engine.kernels.triton.cost import Cost
from engine.kernels.triton.gated import gated, gated_cost
from engine.kernels.triton.rms_norm import add_rms_norm, add_rms_norm_cost, head_norm, head_norm_cost
from engine.kernels.triton.rope import rotate, rotate_cost

_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Relative; the interpreter cuts float32 to bfloat16 where a card rounds."""


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_near(found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor | None = None) -> None:
    """`size`: what is left after terms of about that size have cancelled."""
    scale = (expected if size is None else size).abs().clamp(min=0.1)
    assert ((found.double() - expected).abs() <= _TOLERANCE[found.dtype] * scale).all()


def _normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", _TOLERANCE)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (3, 576), (2, 1000), (5, 64)])
def test_a_norm_is_of_its_row_alone_and_may_be_in_place(dtype: torch.dtype, num_rows: int, size: int) -> None:
    x, weight = _random(num_rows, size + 3, dtype=dtype)[:, :size], _random(size, dtype=torch.float32, seed=1)
    expected = _normed(x, weight, 1e-5)
    add_rms_norm(x, None, weight, 1e-5, x)
    _assert_near(x, expected)


@pytest.mark.parametrize("dtype", _TOLERANCE)
@pytest.mark.parametrize("residual_dtype", [torch.float32, None])
def test_what_is_added_stays_in_the_residual_stream_in_its_own_type(dtype: torch.dtype, residual_dtype: torch.dtype | None) -> None:
    x, residual = _random(4, 200, dtype=dtype), _random(4, 200, dtype=residual_dtype or dtype, seed=1)
    weight, out = _random(200, dtype=torch.float32, seed=2), torch.full((4, 210), torch.nan, dtype=dtype)
    total = residual.double() + x.double()
    add_rms_norm(x, residual, weight, 1e-6, out[:, :200])
    _assert_near(residual, total)
    _assert_near(out[:, :200], _normed(residual, weight, 1e-6))
    assert out[:, 200:].isnan().all()


@pytest.mark.parametrize("dtype", _TOLERANCE)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_heads_of_a_fused_row_are_normed_one_by_one(dtype: torch.dtype, head_dim: int) -> None:
    fused, weight = _random(3, 5 * head_dim, dtype=dtype), _random(head_dim, dtype=torch.float32, seed=1)
    before = fused.clone()
    heads = fused.view(3, 5, head_dim)[:, 1:4]
    expected = _normed(heads, weight, 1e-6)
    head_norm(heads, weight, 1e-6)
    _assert_near(heads, expected)
    assert torch.equal(fused[:, :head_dim], before[:, :head_dim]) and torch.equal(fused[:, 4 * head_dim :], before[:, 4 * head_dim :])


@pytest.mark.parametrize("dtype", _TOLERANCE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "half"), [(9, 3, 64, 32), (4, 4, 80, 40), (2, 1, 96, 24), (1, 1, 16, 8)])
def test_queries_and_keys_are_rotated_by_their_own_positions(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, half: int) -> None:
    fused = _random(5, (num_heads + num_kv_heads) * head_dim, dtype=dtype).view(5, -1, head_dim)
    query, key = fused[:, :num_heads], fused[:, num_heads:]
    angles = torch.outer(torch.arange(50, dtype=torch.float32), 0.9 ** torch.arange(half))
    positions = torch.tensor([0, 49, 3, 3, 17], dtype=torch.int32)
    expected = fused.double().clone()
    cosine, sine = (table[positions.long()][:, None].double() for table in (angles.cos(), angles.sin()))
    first, second = fused[..., :half].double(), fused[..., half : 2 * half].double()
    expected[..., :half], expected[..., half : 2 * half] = first * cosine - second * sine, second * cosine + first * sine
    rotate(query, key, angles.cos(), angles.sin(), positions)
    _assert_near(fused, expected)
    assert torch.equal(fused[..., 2 * half :].double(), expected[..., 2 * half :]), "what is not rotated is not touched"


@pytest.mark.parametrize("dtype", _TOLERANCE)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("size", [1, 300, 1025])
def test_gates_are_those_of_torch_in_float64(dtype: torch.dtype, activation: Activation, size: int) -> None:
    gate_up, out = _random(3, 2 * size, dtype=dtype) * 4, torch.full((3, size + 5), torch.nan, dtype=dtype)
    gated(gate_up, activation, out[:, :size])
    gate, up = gate_up.double().chunk(2, dim=-1)
    approximate = "tanh" if activation is Activation.GELU_TANH else "none"
    active = torch.nn.functional.silu(gate) if activation is Activation.SILU else torch.nn.functional.gelu(gate, approximate=approximate)
    _assert_near(out[:, :size], active * up, gate * up)
    assert out[:, size:].isnan().all()


def test_nothing_is_done_for_no_tokens() -> None:
    none = torch.empty(0, 32)
    add_rms_norm(none, none, torch.ones(32), 1e-5, none)
    head_norm(none.view(0, 2, 16), torch.ones(16), 1e-5)
    rotate(none.view(0, 2, 16), none.view(0, 2, 16), torch.ones(1, 8), torch.ones(1, 8), torch.empty(0, dtype=torch.int32))
    gated(torch.empty(0, 64), Activation.SILU, none)


def test_costs_count_what_is_read_and_written_once() -> None:
    assert add_rms_norm_cost(3, 10, 2) == Cost(3 * 10 * 4, 3 * 10 * 4)
    assert add_rms_norm_cost(3, 10, 2, 4) == Cost(3 * 10 * (4 + 8), 3 * 10 * 5)
    assert head_norm_cost(3, 2, 10, 2) == Cost(3 * 2 * 10 * 4, 3 * 2 * 10 * 4)
    assert rotate_cost(3, 4, 2, 8, 2) == Cost(3 * 6 * 16 * 4 + 3 * 16 * 4, 6 * 3 * 6 * 8)
    assert gated_cost(3, 10, 2) == Cost(3 * 30 * 2, 300)
