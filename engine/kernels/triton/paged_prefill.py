"""Attention of chunks of prompts, and of anything else, over the paged pool.

A row's keys are taken in tiles of 64 on a grid that begins at position 0, in their order, and tiles in which it sees nothing leave its bits alone. So these
depend neither on the batch nor on the cut of a prompt into chunks; a batch-invariant run uses this kernel for decode too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.attention import Scores
from engine.device_batch import DeviceBatch
from engine.kernels.triton.attention_tile import shape_of, visit_keys
from engine.kernels.triton.cost import Cost

_ROWS, _KEYS = 64, 64


def paged_prefill(query: torch.Tensor, pool: torch.Tensor, layer: int, batch: DeviceBatch, scores: Scores, out: torch.Tensor) -> None:
    """query and out [tokens, num_heads, head_dim], tokens and heads may lie apart; keys and values of the tokens are in the pool already.

    Each chunk's tokens see what their sequence has in the pool up to their own position, or the last `window` of it. Rows of padding chunks are written, with
    whatever the null block gives.
    """
    num_heads = query.shape[1]
    shape = shape_of(num_heads, pool, scores)
    tokens = max(_ROWS // shape.group_rows, 1)
    grid = (triton.cdiv(batch.max_query_len, tokens), batch.num_seqs, shape.num_kv_heads)
    _paged_prefill_kernel[grid](
        query,
        pool,
        out,
        batch.query_starts,
        batch.first_positions,
        batch.tables,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        batch.tables.stride(0),
        pool.stride(0),
        layer * pool.stride(1),
        pool.stride(2),
        shape.scale,
        shape.softcap,
        GROUP=shape.group,
        GROUP_ROWS=shape.group_rows,
        TOKENS=tokens,
        HEAD_DIM=shape.head_dim,
        BLOCK_DIM=shape.block_dim,
        NUM_KV_HEADS=shape.num_kv_heads,
        BLOCK_SIZE=shape.block_size,
        WINDOW=shape.window,
        CAPPED=shape.softcap > 0,
        BLOCK_N=_KEYS,
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=4 if shape.block_dim <= 128 else 8,
        num_stages=2,
    )


def paged_prefill_cost(chunks: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int, element_size: int, window: int = 0) -> Cost:
    """Of chunks (first position, tokens): keys and values once a chunk, queries and outputs; two products a pair of a query head and a key that it sees."""
    num_keys = pairs = num_tokens = 0
    for first, count in chunks:
        seen = [min(position + 1, window or position + 1) for position in range(first, first + count)]
        num_tokens, pairs = num_tokens + count, pairs + sum(seen)
        num_keys += min(first + count, (window + count - 1) if window else first + count)
    num_bytes = (2 * num_keys * num_kv_heads + 2 * num_tokens * num_heads) * head_dim * element_size
    return Cost(num_bytes, 4 * pairs * num_heads * head_dim)


@triton.jit(do_not_specialize=["layer_offset"])
def _paged_prefill_kernel(
    query,
    pool,
    out,
    query_starts,
    first_positions,
    tables,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    block_stride,
    layer_offset,
    half_stride,
    scale,
    softcap,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    seq = tl.program_id(1)
    kv_head = tl.program_id(2)
    start = tl.load(query_starts + seq)
    count = tl.load(query_starts + seq + 1) - start
    first_token = tl.program_id(0) * TOKENS
    if first_token >= count:
        return
    row = tl.arange(0, TOKENS * GROUP_ROWS)
    token = first_token + row // GROUP_ROWS
    head = row % GROUP_ROWS
    element = tl.arange(0, BLOCK_DIM)
    mask = ((token < count) & (head < GROUP))[:, None] & (element < HEAD_DIM)[None, :]
    place = (start + token).to(tl.int64)[:, None]
    heads = (kv_head * GROUP + head)[:, None]
    rows = tl.load(query + place * query_token_stride + heads * query_head_stride + element[None, :], mask=mask, other=0.0)
    if WIDEN:
        rows = rows.to(tl.float32)
    first_position = tl.load(first_positions + seq)
    positions = first_position + token
    end = first_position + min(first_token + TOKENS, count)
    lower = 0
    if WINDOW > 0:
        lower = max(first_position + first_token - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    maximum = tl.full([TOKENS * GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS * GROUP_ROWS], tl.float32)
    sums = tl.zeros([TOKENS * GROUP_ROWS, BLOCK_DIM], tl.float32)
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
    found = sums / total[:, None]
    tl.store(out + place * out_token_stride + heads * out_head_stride + element[None, :], found.to(out.dtype.element_ty), mask=mask)
