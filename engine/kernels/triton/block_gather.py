"""Whole blocks out of the pool into one buffer, and back: what a hand-over sends through staging memory. Bytes pass through as they are."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from engine.kernels.triton.cost import Cost

_WORDS = 4096
"""Of four bytes, that a program copies."""


def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = pool[block_ids[i]]; pool [num_blocks, ...] and out [len(block_ids), ...] of one type without gaps, a block of a multiple of four bytes."""
    _copy(_words(pool), block_ids, _words(out), gather=True)


def scatter_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[block_ids[i]] = blocks[i]; no id may come twice."""
    _copy(_words(pool), block_ids, _words(blocks), gather=False)


def copy_blocks_cost(num_blocks: int, block_bytes: int) -> Cost:
    """Read and written; an id is read for each block."""
    return Cost(2 * num_blocks * block_bytes + 8 * num_blocks, 0)


def _words(blocks: torch.Tensor) -> torch.Tensor:
    """A view as int32 [blocks, words]. Raises RuntimeError where there is none."""
    return blocks.view(len(blocks), math.prod(blocks.shape[1:])).view(torch.int32)


def _copy(pool: torch.Tensor, block_ids: torch.Tensor, buffer: torch.Tensor, *, gather: bool) -> None:
    if len(block_ids) == 0:
        return
    num_words = pool.shape[1]
    grid = (len(block_ids), triton.cdiv(num_words, _WORDS))
    _copy_kernel[grid](pool, block_ids, buffer, NUM_WORDS=num_words, GATHER=gather, BLOCK=_WORDS, num_warps=8)


@triton.jit
def _copy_kernel(pool, block_ids, buffer, NUM_WORDS: tl.constexpr, GATHER: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < NUM_WORDS
    inside = pool + tl.load(block_ids + index).to(tl.int64) * NUM_WORDS + place
    outside = buffer + index * NUM_WORDS + place
    if GATHER:
        tl.store(outside, tl.load(inside, mask=mask), mask=mask)
    else:
        tl.store(inside, tl.load(outside, mask=mask), mask=mask)
