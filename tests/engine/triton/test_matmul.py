"""Products of one order of sums, in Triton's interpreter: near float64, and the same bits whatever shares a batch."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.triton.cost import Cost
from engine.kernels.triton.matmul import Tile, matmul, matmul_cost, tile_of

_TOLERANCE = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""Of an output: its rounding, which for bfloat16 the interpreter does by cutting off."""


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(1, 100, 96), (64, 32, 128), (65, 31, 257), (130, 96, 1000), (3, 1, 1)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_products_are_near_float64(dtype: torch.dtype, num_rows: int, num_outputs: int, num_inputs: int, biased: bool, wide: bool) -> None:
    x, weight = _random(num_rows, num_inputs, dtype=dtype), _random(num_outputs, num_inputs, dtype=dtype, seed=1)
    bias = _random(num_outputs, dtype=dtype, seed=2) if biased else None
    out = torch.full((num_rows, num_outputs), torch.nan, dtype=torch.float32 if wide else dtype)
    matmul(x, weight, bias, out)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T + 1
    assert ((out.double() - expected).abs() <= _TOLERANCE[out.dtype] * expected.abs() + 2.0**-22 * size).all()


@pytest.mark.parametrize(("num_rows", "num_outputs", "block_n"), [(64 * 5 + 3, 100, 32), (3, 64 * 128 + 5, 64)])
def test_all_tiles_of_all_groups_are_computed(monkeypatch: pytest.MonkeyPatch, num_rows: int, num_outputs: int, block_n: int) -> None:
    monkeypatch.setattr("engine.kernels.triton.matmul._GROUP_M", 2)
    assert tile_of(num_outputs, 4).block_n == block_n
    x, weight = _random(num_rows, 8, dtype=torch.float32), _random(num_outputs, 8, dtype=torch.float32, seed=1)
    out = torch.full((num_rows, num_outputs), torch.nan)
    matmul(x, weight, None, out)
    assert torch.allclose(out, x @ weight.T, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_at_every_place_of_every_batch(dtype: torch.dtype) -> None:
    row, weight, bias = _random(1, 1000, dtype=dtype), _random(70, 1000, dtype=dtype, seed=1), _random(70, dtype=dtype, seed=2)
    alone = torch.empty(1, 70)
    matmul(row, weight, bias, alone)
    for num_rows, places in ((2, (0, 1)), (63, (0, 31, 62)), (64, (63,)), (65, (0, 64)), (200, (0, 7, 128, 199))):
        for place in places:
            x = _random(num_rows, 1000, dtype=dtype, seed=num_rows + place) * 50
            x[place] = row
            out = torch.empty(num_rows, 70)
            matmul(x, weight, bias, out)
            assert torch.equal(out[place], alone[0]), f"row {place} of {num_rows}"


def test_rows_may_lie_apart_and_neighbours_are_left_alone() -> None:
    x, weight = _random(5, 40, dtype=torch.float32)[:, :24], _random(9, 30, dtype=torch.float32, seed=1)[:, :24]
    out = torch.zeros(5, 20)
    matmul(x, weight, None, out[:, 3:12])
    assert torch.allclose(out[:, 3:12], x @ weight.T, atol=1e-5)
    assert not out[:, :3].any() and not out[:, 12:].any()


def test_a_tile_goes_by_the_weight_and_fits_the_shared_memory_of_every_card_that_counts() -> None:
    assert [tile_of(size, 2).block_n for size in (576, 4096, 8192, 28672, 128256)] == [32, 32, 64, 128, 128]
    for num_outputs in (1, 576, 8192, 128256):
        for element_size in (2, 4):
            tile: Tile = tile_of(num_outputs, element_size)
            assert (64 + tile.block_n) * tile.block_k * element_size * tile.num_stages <= 99 << 10


def test_cost_counts_each_element_once() -> None:
    assert matmul_cost(3, 5, 7, 2, 4) == Cost((3 * 7 + 5 * 7) * 2 + 3 * 5 * 4, 2 * 3 * 5 * 7)
