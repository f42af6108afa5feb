"""C structures that the native kernels are called with; each mirrors the one of its name in attention.h, linear.h, rows.h or decoder.cpp."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

from engine.attention import PackedBatch, Scores

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernels call a type of weights and pool."""

_INT, _FLOAT, _POINTER = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class CBatch(ctypes.Structure):
    """`Batch` of attention.h."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("chunk_starts", "first_positions", "table_starts", "tables")),
        *((name, _INT) for name in ("num_chunks", "block_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")),
    ]


class CPacked(ctypes.Structure):
    """`Packed` of attention.h."""

    _fields_: ClassVar = [("elements", _POINTER), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class CScores(ctypes.Structure):
    """`Scores` of attention.h."""

    _fields_: ClassVar = [("scale", _FLOAT), ("softcap", _FLOAT), ("window", _INT)]


class CNorm(ctypes.Structure):
    """`Norm` of rows.h."""

    _fields_: ClassVar = [("weight", _POINTER), ("epsilon", _FLOAT)]


class CLinear(ctypes.Structure):
    """`Linear` of linear.h."""

    _fields_: ClassVar = [("panels", _POINTER), ("bias", _POINTER), ("num_inputs", _INT), ("num_panels", _INT)]


class CRope(ctypes.Structure):
    """`Rope` of decoder.cpp."""

    _fields_: ClassVar = [("frequencies", _POINTER), ("num_frequencies", _INT), ("scale", _FLOAT)]


class CLayer(ctypes.Structure):
    """`Layer` of decoder.cpp."""

    _fields_: ClassVar = [
        *((name, CNorm) for name in ("input_norm", "q_norm", "k_norm", "after_attention", "mlp_norm", "after_mlp")),
        *((name, CLinear) for name in ("qkv", "output", "gate_up", "down")),
        ("scores", CScores),
        ("rope", _INT),
    ]


class CDecoder(ctypes.Structure):
    """`Decoder` of decoder.cpp."""

    _fields_: ClassVar = [
        ("layers", _POINTER),
        ("ropes", _POINTER),
        ("embedding", _POINTER),
        ("head", CLinear),
        ("final_norm", CNorm),
        ("embedding_scale", _FLOAT),
        *(
            (name, _INT)
            for name in ("num_layers", "num_ropes", "hidden_size", "inner_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "activation")
        ),
    ]


def c_batch(batch: PackedBatch, pool: torch.Tensor, num_heads: int) -> CBatch:
    """Points at the batch's arrays, which the caller keeps. `pool` is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""
    _, num_layers, _, block_size, num_kv_heads, head_dim = pool.shape
    arrays = (batch.chunk_starts, batch.first_positions, batch.table_starts, batch.tables)
    return CBatch(*(array.ctypes.data for array in arrays), len(batch.first_positions), block_size, num_layers, num_heads, num_kv_heads, head_dim)


def c_scores(scores: Scores) -> CScores:
    """By value."""
    return CScores(scores.scaling, scores.softcap or 0.0, scores.window or 0)
