"""Root-mean-square norms: of the residual stream, with what is added to it, and of heads. Memory is their limit: each element is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.cost import Cost


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """out = norm(x), or residual += x and out = norm(residual); rows of [tokens, size] may lie apart, `out` may be `x`, and types may differ.

    The mean is float32, over a row by itself; `weight` is float32 [size].
    """
    num_rows, size = x.shape
    if num_rows == 0:
        return
    residual_stride = 0 if residual is None else residual.stride(0)
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(num_rows,)](
        x, residual, weight, out, x.stride(0), residual_stride, out.stride(0), epsilon, SIZE=size, BLOCK=block, num_warps=_warps(block)
    )


def head_norm(heads: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """In place, each head of [tokens, heads, head_dim] by itself."""
    num_tokens, num_heads, head_dim = heads.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(head_dim)
    _head_norm_kernel[(num_tokens, num_heads)](heads, weight, heads.stride(0), heads.stride(1), epsilon, SIZE=head_dim, BLOCK=block, num_warps=1)


def add_rms_norm_cost(num_rows: int, size: int, element_size: int, residual_element_size: int = 0) -> Cost:
    """x read and out written; a residual read and written; four operations an element, and one more for the sum."""
    return Cost(num_rows * size * (2 * element_size + 2 * residual_element_size), num_rows * size * (4 + (residual_element_size > 0)))


def head_norm_cost(num_tokens: int, num_heads: int, head_dim: int, element_size: int) -> Cost:
    """Each element read and written."""
    return Cost(2 * num_tokens * num_heads * head_dim * element_size, 4 * num_tokens * num_heads * head_dim)


def _warps(block: int) -> int:
    """Eight elements a thread and load, up to what one program may have."""
    return min(max(block // 256, 1), 16)


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, out, x_stride, residual_stride, out_stride, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    mask = place < SIZE
    values = tl.load(x + row * x_stride + place, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        at = residual + row * residual_stride + place
        total = (tl.load(at, mask=mask, other=0.0).to(tl.float32) + values).to(residual.dtype.element_ty)
        tl.store(at, total, mask=mask)
        values = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + epsilon)
    scaled = values * factor * tl.load(weight + place, mask=mask, other=0.0)
    tl.store(out + row * out_stride + place, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _head_norm_kernel(heads, weight, token_stride, head_stride, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    mask = place < SIZE
    at = heads + tl.program_id(0).to(tl.int64) * token_stride + tl.program_id(1) * head_stride + place
    values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + epsilon)
    scaled = values * factor * tl.load(weight + place, mask=mask, other=0.0)
    tl.store(at, scaled.to(heads.dtype.element_ty), mask=mask)
