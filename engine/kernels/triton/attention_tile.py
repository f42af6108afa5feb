"""One tile of keys against a tile of query rows: what the kernels of prefill and decode share.

Query rows of a KV head go together: row r is query head r % GROUP of token r // GROUP, GROUP being the heads of a KV head filled up to a power of two. Scores
are kept as exponents of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.attention import Scores

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Shape:
    """What a launch is compiled for, besides its types."""

    group: int
    """Query heads of a KV head."""
    group_rows: int
    """Those filled up to a power of two."""
    block_dim: int
    """head_dim filled up to a power of two of at least 16."""
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int
    """0: none."""
    scale: float
    """What a product of query and key is multiplied by: up to an exponent of two, or to the cap's share."""
    softcap: float
    """What tanh is multiplied by, up to an exponent of two; 0: no cap."""


def shape_of(num_heads: int, pool: torch.Tensor, scores: Scores) -> Shape:
    """For a pool [blocks, layers, 2, block_size, num_kv_heads, head_dim]."""
    _, _, _, block_size, num_kv_heads, head_dim = pool.shape
    group = num_heads // num_kv_heads
    capped = scores.softcap or 0.0
    scale = scores.scaling / capped if capped else scores.scaling * _LOG2_E
    block_dim = max(triton.next_power_of_2(head_dim), 16)
    return Shape(group, triton.next_power_of_2(group), block_dim, num_kv_heads, head_dim, block_size, scores.window or 0, scale, capped * _LOG2_E)


@triton.jit
def visit_keys(
    query,
    keys,
    table,
    first,
    end,
    positions,
    maximum,
    total,
    sums,
    block_stride,
    half_stride,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Takes keys `first` to `first + BLOCK_N`, those before `end` and up to a row's own position, into its running maximum, total and sums.

    A row that sees none of them keeps its bits. `keys` points at the layer's and head's first key in block 0.
    """
    place = first + tl.arange(0, BLOCK_N)
    element = tl.arange(0, BLOCK_DIM)
    there = place < end
    block = tl.load(table + place // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    at = keys + block * block_stride + place % BLOCK_SIZE * (NUM_KV_HEADS * HEAD_DIM)
    inside = there & (place >= 0)
    key = tl.load(at[None, :] + element[:, None], mask=inside[None, :] & (element[:, None] < HEAD_DIM), other=0.0)
    value = tl.load(at[:, None] + half_stride + element[None, :], mask=inside[:, None] & (element[None, :] < HEAD_DIM), other=0.0)
    if WIDEN:  # the interpreter's bfloat16 is broken
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if CAPPED:
        scores = (2.0 * tl.sigmoid(2.0 * scores) - 1.0) * softcap
    distance = positions[:, None] - place[None, :]
    visible = (distance >= 0) & there[None, :]
    if WINDOW > 0:
        visible &= distance < WINDOW
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(maximum, tl.max(scores, axis=1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.where(maximum == highest, 1.0, tl.exp2(maximum - base))
    total = total * factor + tl.sum(weights, axis=1)
    sums = sums * factor[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return highest, total, sums
