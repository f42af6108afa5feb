"""Keys and values of a step's tokens into a layer of the paged pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.cost import Cost


def write_kv(key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    """key and value [tokens, num_kv_heads, head_dim], tokens and heads may lie apart; pool [blocks, layers, 2, block_size, num_kv_heads, head_dim].

    A token's slot is its block times block_size plus its place there, int64; padding has slots of the null block.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    key, value, pool = (_bits(each) for each in (key, value, pool))
    block_heads, block_dim = triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(head_dim)
    _write_kv_kernel[(num_tokens, 2)](
        key,
        value,
        pool,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pool.stride(0),
        layer * pool.stride(1),
        pool.stride(2),
        BLOCK_SIZE=pool.shape[3],
        NUM_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        num_warps=min(max(block_heads * block_dim // 256, 1), 8),
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: nothing is computed here, and the interpreter's bfloat16 is broken."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def write_kv_cost(num_tokens: int, num_kv_heads: int, head_dim: int, element_size: int) -> Cost:
    """Keys and values are read and written, and a slot is read for each token."""
    return Cost(4 * num_tokens * num_kv_heads * head_dim * element_size + 8 * num_tokens, 0)


@triton.jit(do_not_specialize=["layer_offset"])
def _write_kv_kernel(
    key,
    value,
    pool,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    pool_block_stride,
    layer_offset,
    pool_half_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    place = tl.arange(0, BLOCK_DIM)[None, :]
    mask = (head < NUM_HEADS) & (place < HEAD_DIM)
    slot = tl.load(slots + token)
    to = pool + slot // BLOCK_SIZE * pool_block_stride + layer_offset + half * pool_half_stride
    to += slot % BLOCK_SIZE * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + place
    if half == 0:
        tl.store(to, tl.load(key + token * key_token_stride + head * key_head_stride + place, mask=mask), mask=mask)
    else:
        tl.store(to, tl.load(value + token * value_token_stride + head * value_head_stride + place, mask=mask), mask=mask)
