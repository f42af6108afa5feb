"""Rotation of queries and keys by their positions, in place, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.cost import Cost


def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
    """Element i of the first 2 * half of a head with element i + half; query and key [tokens, heads, head_dim], heads and tokens may lie apart.

    cos and sin are float32 [positions, half] without gaps; `positions` [tokens] chooses a token's row.
    """
    num_tokens, num_heads, _ = query.shape
    if num_tokens == 0:
        return
    num_kv_heads, half = key.shape[1], cos.shape[1]
    block_heads = triton.next_power_of_2(max(num_heads, num_kv_heads))
    _rotate_kernel[(num_tokens, 2)](
        query,
        key,
        cos,
        sin,
        positions,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=min(max(block_heads * half // 512, 1), 8),
    )


def rotate_cost(num_tokens: int, num_heads: int, num_kv_heads: int, half: int, element_size: int) -> Cost:
    """What is rotated is read and written, cosines and sines are read once a token; six operations a pair."""
    pairs = num_tokens * (num_heads + num_kv_heads) * half
    return Cost(4 * pairs * element_size + 2 * num_tokens * half * 4, 6 * pairs)


@triton.jit
def _rotate_kernel(
    query,
    key,
    cos,
    sin,
    positions,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    place = tl.arange(0, BLOCK_HALF)[None, :]
    angle = tl.load(positions + token).to(tl.int64) * HALF + place
    cosine = tl.load(cos + angle, mask=place < HALF, other=0.0)
    sine = tl.load(sin + angle, mask=place < HALF, other=0.0)
    if tl.program_id(1) == 0:
        at = query + token * query_token_stride + head * query_head_stride + place
        _turn(at, cosine, sine, (head < NUM_HEADS) & (place < HALF), HALF)
    else:
        at = key + token * key_token_stride + head * key_head_stride + place
        _turn(at, cosine, sine, (head < NUM_KV_HEADS) & (place < HALF), HALF)


@triton.jit
def _turn(at, cosine, sine, mask, HALF: tl.constexpr):
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (first * cosine - second * sine).to(at.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (second * cosine + first * sine).to(at.dtype.element_ty), mask=mask)
