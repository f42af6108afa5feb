"""Keys and values into the pool, and whole blocks out of it and back: bytes as they are."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.triton.block_gather import copy_blocks_cost, gather_blocks, scatter_blocks
from engine.kernels.triton.cost import Cost
from engine.kernels.triton.kv_write import write_kv, write_kv_cost

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(3, 64, 16), (1, 80, 8), (2, 16, 32)])
def test_each_token_goes_to_its_slot_of_its_layer_and_nowhere_else(dtype: torch.dtype, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    pool = torch.full((5, 3, 2, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    fused = torch.randn(4, 2 * num_kv_heads + 1, head_dim).to(dtype)
    key, value = fused[:, 1 : 1 + num_kv_heads], fused[:, 1 + num_kv_heads :]
    slots = torch.tensor([0, 2 * block_size + 5, 4 * block_size, block_size - 1])
    write_kv(key, value, pool, 1, slots)
    for index, slot in enumerate(slots.tolist()):
        assert torch.equal(pool[slot // block_size, 1, 0, slot % block_size], key[index])
        assert torch.equal(pool[slot // block_size, 1, 1, slot % block_size], value[index])
    assert (~pool.isnan()).sum() == 4 * 2 * num_kv_heads * head_dim


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 2, 16, 3, 64), (30, 2, 16, 3, 64), (1, 2, 1, 1, 16)])
def test_blocks_leave_and_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pool = torch.randint(-(2**15), 2**15, (7, *shape), dtype=torch.int16).view(dtype) if dtype.itemsize == 2 else torch.randn(7, *shape)
    words, ids = pool.view(torch.int16), torch.tensor([6, 0, 3])
    out = torch.empty(3, *shape, dtype=dtype)
    gather_blocks(pool, ids, out)
    assert torch.equal(out.view(torch.int16), words[ids])
    other = torch.zeros_like(pool)
    scatter_blocks(out, ids, other)
    assert torch.equal(other.view(torch.int16)[ids], words[ids])
    assert not other.view(torch.int16)[[1, 2, 4, 5]].any()


def test_nothing_is_done_for_nothing() -> None:
    pool = torch.ones(2, 1, 2, 4, 1, 16)
    write_kv(torch.empty(0, 1, 16), torch.empty(0, 1, 16), pool, 0, torch.empty(0, dtype=torch.int64))
    gather_blocks(pool, torch.empty(0, dtype=torch.int64), torch.empty(0, 1, 2, 4, 1, 16))
    assert pool.eq(1).all()


def test_costs_count_reading_and_writing() -> None:
    assert write_kv_cost(3, 2, 16, 2) == Cost(4 * 3 * 2 * 16 * 2 + 24, 0)
    assert copy_blocks_cost(3, 1000) == Cost(6000 + 24, 0)
