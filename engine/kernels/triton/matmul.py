"""Products whose sums have one order whatever the number of rows: what `batch_invariant` takes in place of cuBLAS, which chooses by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.triton.cost import Cost

_BLOCK_M = 64
"""Rows of a tile, always, as another size could be another instruction: the fewest that Hopper's tensor cores take at once, so that one row costs no more."""
_MIN_PROGRAMS = 128
"""Outputs are cut into at least so many tiles where they can be: about the processors of a large card, all of which must read when there are few rows."""
_GROUP_M = 16
"""Tiles of rows that run next to each other on the same outputs: their weights then come from the L2 cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut; goes by its weight alone."""

    block_n: int
    block_k: int
    num_stages: int


def tile_of(num_outputs: int, element_size: int) -> Tile:
    """Of a weight with elements of so many bytes; four stages of a tile fill 96 KiB of shared memory."""
    block_n = next((size for size in (128, 64) if num_outputs >= size * _MIN_PROGRAMS), 32)
    return Tile(block_n, (128 if block_n == 32 else 64) * 2 // element_size, 4)


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [M, N] = x [M, K] @ weight [N, K].T + bias [N], summed in float32 in an order that M and the other rows have no part in.

    x and weight have one dtype, float32, bfloat16 or float16, and rows without gaps between their elements; out may be float32 whatever theirs is.
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    tile = tile_of(num_outputs, weight.element_size())
    grid = (triton.cdiv(num_rows, _BLOCK_M) * triton.cdiv(num_outputs, tile.block_n),)
    _matmul_kernel[grid](
        x,
        weight,
        bias,
        out,
        num_rows,
        num_outputs,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        NUM_INPUTS=num_inputs,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=_GROUP_M,
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=4,
        num_stages=tile.num_stages,
    )


def matmul_cost(num_rows: int, num_outputs: int, num_inputs: int, element_size: int, out_element_size: int) -> Cost:
    """x and weight are read and out is written; a bias is left out."""
    num_bytes = (num_rows + num_outputs) * num_inputs * element_size + num_rows * num_outputs * out_element_size
    return Cost(num_bytes, 2 * num_rows * num_outputs * num_inputs)


@triton.jit(do_not_specialize=["num_rows"])  # else it is compiled anew, under load, for one row and for multiples of 16
def _matmul_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    x_stride,
    weight_stride,
    out_stride,
    NUM_INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WIDEN: tl.constexpr,
):
    program = tl.program_id(0)
    num_m = tl.cdiv(num_rows, BLOCK_M)
    num_n = tl.cdiv(num_outputs, BLOCK_N)
    first_m = program // (GROUP_M * num_n) * GROUP_M
    group = min(num_m - first_m, GROUP_M)
    place = program % (GROUP_M * num_n)
    m = (first_m + place % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = place // group * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_tile = x + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_tile = weight + n.to(tl.int64)[None, :] * weight_stride + k[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, NUM_INPUTS, BLOCK_K):
        row_mask, column_mask = m[:, None] < num_rows, n[None, :] < num_outputs
        if NUM_INPUTS % BLOCK_K:
            row_mask &= first + k[None, :] < NUM_INPUTS
            column_mask &= first + k[:, None] < NUM_INPUTS
        rows = tl.load(x_tile + first, mask=row_mask, other=0.0)
        columns = tl.load(weight_tile + first, mask=column_mask, other=0.0)
        if WIDEN:  # the interpreter's bfloat16 is broken
            rows = rows.to(tl.float32)
            columns = columns.to(tl.float32)
        sums = tl.dot(rows, columns, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * out_stride + n[None, :], sums.to(out.dtype.element_ty), mask=(m[:, None] < num_rows) & (n[None, :] < num_outputs))
