"""Attention of one token of each sequence over the paged pool, its keys split among programs, and a second pass that joins what they found.

A split is always 512 keys long, from position 0 on, and splits are joined in their order: a sequence's bits do not depend on the batch. They are not those of
`paged_prefill`, whose tiles have more rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.attention import Scores
from engine.device_batch import DeviceBatch
from engine.kernels.triton.attention_tile import shape_of, visit_keys
from engine.kernels.triton.cost import Cost

SPLIT = 512
"""Keys of a split."""
_KEYS = 64
_MIN_ROWS = 16
"""Of a matrix product."""


def workspace_of(num_seqs: int, num_heads: int, head_dim: int, max_kv_len: int, device: torch.device) -> torch.Tensor:
    """What splits leave for the second pass: float32 [num_seqs, num_heads, splits, head_dim + 2], a row's sums, total and maximum."""
    return torch.empty(num_seqs, num_heads, triton.cdiv(max_kv_len, SPLIT), head_dim + 2, device=device)


def paged_decode(query: torch.Tensor, pool: torch.Tensor, layer: int, batch: DeviceBatch, scores: Scores, out: torch.Tensor, workspace: torch.Tensor) -> None:
    """query and out [num_seqs, num_heads, head_dim], rows and heads may lie apart: one token of each sequence, whose key and value are in the pool already.

    `workspace` is at least `workspace_of` the same sizes. A padding sequence sees the null block's first slot.
    """
    num_seqs, num_heads, head_dim = query.shape
    shape = shape_of(num_heads, pool, scores)
    num_splits = triton.cdiv(batch.max_kv_len, SPLIT)
    work = workspace.view(-1)[: num_seqs * num_heads * num_splits * (head_dim + 2)]
    _split_kernel[(num_splits, num_seqs, shape.num_kv_heads)](
        query,
        pool,
        work,
        batch.first_positions,
        batch.tables,
        query.stride(0),
        query.stride(1),
        batch.tables.stride(0),
        pool.stride(0),
        layer * pool.stride(1),
        pool.stride(2),
        shape.scale,
        shape.softcap,
        num_splits,
        GROUP=shape.group,
        ROWS=max(shape.group_rows, _MIN_ROWS),
        HEAD_DIM=shape.head_dim,
        BLOCK_DIM=shape.block_dim,
        NUM_KV_HEADS=shape.num_kv_heads,
        BLOCK_SIZE=shape.block_size,
        WINDOW=shape.window,
        CAPPED=shape.softcap > 0,
        BLOCK_N=_KEYS,
        SPLIT_LEN=SPLIT,
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=4,
        num_stages=3 if shape.block_dim <= 128 else 2,
    )
    _join_kernel[(num_seqs, num_heads)](
        work,
        out,
        batch.first_positions,
        out.stride(0),
        out.stride(1),
        num_splits,
        HEAD_DIM=shape.head_dim,
        BLOCK_DIM=shape.block_dim,
        WINDOW=shape.window,
        SPLIT_LEN=SPLIT,
        num_warps=1,
    )


def paged_decode_cost(contexts: list[int], num_heads: int, num_kv_heads: int, head_dim: int, element_size: int, window: int = 0) -> Cost:
    """Of sequences with so many keys each, their own included: keys, values, queries, outputs; the workspace is left out."""
    num_keys = sum(min(context, window or context) for context in contexts)
    num_bytes = (2 * num_keys * num_kv_heads + 2 * len(contexts) * num_heads) * head_dim * element_size
    return Cost(num_bytes, 4 * num_keys * num_heads * head_dim)


@triton.jit(do_not_specialize=["layer_offset", "num_splits"])
def _split_kernel(
    query,
    pool,
    work,
    first_positions,
    tables,
    query_token_stride,
    query_head_stride,
    table_stride,
    block_stride,
    layer_offset,
    half_stride,
    scale,
    softcap,
    num_splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    split = tl.program_id(0)
    seq = tl.program_id(1)
    kv_head = tl.program_id(2)
    position = tl.load(first_positions + seq)
    end = min(position + 1, (split + 1) * SPLIT_LEN)
    lower = split * SPLIT_LEN
    if WINDOW > 0:
        lower = max(lower, max(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N)
    if lower >= end:
        return
    head = tl.arange(0, ROWS)
    element = tl.arange(0, BLOCK_DIM)
    mask = (head < GROUP)[:, None] & (element < HEAD_DIM)[None, :]
    heads = (kv_head * GROUP + head)[:, None]
    rows = tl.load(query + seq.to(tl.int64) * query_token_stride + heads * query_head_stride + element[None, :], mask=mask, other=0.0)
    if WIDEN:
        rows = rows.to(tl.float32)
    positions = tl.zeros([ROWS], tl.int32) + position
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    keys = pool + layer_offset + kv_head * HEAD_DIM
    for first in range(lower, end, BLOCK_N):
        maximum, total, sums = visit_keys(
            rows,
            keys,
            tables + seq.to(tl.int64) * table_stride,
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
            HEAD_DIM,
            BLOCK_DIM,
            NUM_KV_HEADS,
            BLOCK_SIZE,
            WINDOW,
            CAPPED,
            BLOCK_N,
            WIDEN,
        )
    row = (seq.to(tl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + head) * num_splits + split
    at = work + row * (HEAD_DIM + 2)
    tl.store(at[:, None] + element[None, :], sums, mask=mask)
    tl.store(at + HEAD_DIM, total, mask=head < GROUP)
    tl.store(at + HEAD_DIM + 1, maximum, mask=head < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _join_kernel(
    work,
    out,
    first_positions,
    out_token_stride,
    out_head_stride,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
):
    seq = tl.program_id(0)
    head = tl.program_id(1)
    position = tl.load(first_positions + seq)
    first = 0
    if WINDOW > 0:
        first = max(position - WINDOW + 1, 0) // SPLIT_LEN
    element = tl.arange(0, BLOCK_DIM)
    mask = element < HEAD_DIM
    row = (seq.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    maximum = float("-inf")
    total = 0.0
    sums = tl.zeros([BLOCK_DIM], tl.float32)
    for split in range(first, position // SPLIT_LEN + 1):
        at = work + (row + split) * (HEAD_DIM + 2)
        its_maximum = tl.load(at + HEAD_DIM + 1)
        highest = tl.maximum(maximum, its_maximum)
        factor = tl.exp2(maximum - highest)
        its_factor = tl.exp2(its_maximum - highest)
        sums = sums * factor + tl.load(at + element, mask=mask, other=0.0) * its_factor
        total = total * factor + tl.load(at + HEAD_DIM) * its_factor
        maximum = highest
    tl.store(out + seq.to(tl.int64) * out_token_stride + head * out_head_stride + element, (sums / total).to(out.dtype.element_ty), mask=mask)
