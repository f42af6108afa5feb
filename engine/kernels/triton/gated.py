"""An activation of one half of a row times the other half, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.decoder import Activation
from engine.kernels.triton.cost import Cost

_BLOCK = 1024
_CODES = {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2}


def gated(gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
    """out [tokens, size] = activation(gate_up[:, :size]) * gate_up[:, size:], computed in float32; rows may lie apart."""
    num_tokens, size = out.shape
    if num_tokens == 0:
        return
    grid = (num_tokens, triton.cdiv(size, _BLOCK))
    _gated_kernel[grid](gate_up, out, gate_up.stride(0), out.stride(0), SIZE=size, ACTIVATION=_CODES[activation], BLOCK=_BLOCK, num_warps=4)


def gated_cost(num_tokens: int, size: int, element_size: int) -> Cost:
    """Both halves read, one written; some ten operations an element."""
    return Cost(3 * num_tokens * size * element_size, 10 * num_tokens * size)


@triton.jit
def _gated_kernel(gate_up, out, gate_up_stride, out_stride, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < SIZE
    gate = tl.load(gate_up + row * gate_up_stride + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + SIZE + place, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == 0:
        active = gate * tl.sigmoid(gate)
    elif ACTIVATION == 1:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * inner)  # (1 + tanh t) / 2 is the sigmoid of 2 t
    tl.store(out + row * out_stride + place, (active * up).to(out.dtype.element_ty), mask=mask)
