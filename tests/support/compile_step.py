"""Compiles a step's kernels but the product's for a card that is not here: `python -m tests.support.compile_step 90`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from engine.attention import Scores
from engine.decoder import Activation
from engine.device_batch import DeviceBatch
from engine.kernels.triton.block_gather import gather_blocks, scatter_blocks
from engine.kernels.triton.gated import gated
from engine.kernels.triton.kv_write import write_kv
from engine.kernels.triton.paged_decode import paged_decode, workspace_of
from engine.kernels.triton.paged_prefill import paged_prefill
from engine.kernels.triton.rms_norm import add_rms_norm, head_norm
from engine.kernels.triton.rope import rotate
from tests.support.compile_only import compile_only

_HEADS, _KV_HEADS = 32, 8


def _step(num_tokens: int, head_dim: int, window: int | None) -> None:
    """As a launcher would for so many tokens of one sequence, or of as many sequences."""
    pool = torch.empty(9, 2, 2, 16, _KV_HEADS, head_dim, dtype=torch.bfloat16)
    fused = torch.empty(num_tokens, _HEADS + 2 * _KV_HEADS, head_dim, dtype=torch.bfloat16)
    query, key, value = torch.split(fused, [_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
    out, x = torch.empty(num_tokens, _HEADS, head_dim, dtype=torch.bfloat16), torch.empty(num_tokens, 4096, dtype=torch.bfloat16)
    starts, firsts, tables = torch.empty(2, dtype=torch.int32), torch.empty(1, dtype=torch.int32), torch.empty(1, 8, dtype=torch.int32)
    positions, slots = torch.empty(num_tokens, dtype=torch.int32), torch.empty(num_tokens, dtype=torch.int64)
    batch = DeviceBatch(starts, firsts, tables, positions, slots, num_tokens, 128)
    scores, weight, angles = Scores(head_dim**-0.5, window), torch.empty(4096), torch.empty(128, head_dim // 2)
    add_rms_norm(x, torch.empty(num_tokens, 4096), weight, 1e-5, x)
    add_rms_norm(x, None, weight, 1e-5, x)
    head_norm(query, weight[:head_dim], 1e-5)
    rotate(query, key, angles, angles, positions)
    write_kv(key, value, pool, 1, slots)
    gated(torch.empty(num_tokens, 2 * 14336, dtype=torch.bfloat16), Activation.SILU, torch.empty(num_tokens, 14336, dtype=torch.bfloat16))
    paged_prefill(query, pool, 1, batch, scores, out)
    if num_tokens == 1:
        paged_decode(query, pool, 1, batch, scores, out, workspace_of(1, _HEADS, head_dim, 128, query.device))
        gather_blocks(pool, slots, pool[:1].clone())
        scatter_blocks(pool[:1].clone(), slots, pool)


def main() -> None:
    """One line of JSON for each kernel, without its code."""
    found = compile_only(int(sys.argv[1]))
    for head_dim, window in ((64, None), (128, None), (128, 4096)):
        for num_tokens in (1, 33):
            _step(num_tokens, head_dim, window)
    for kernel in found:
        print(json.dumps({**asdict(kernel), "ptx": "", "uses_tensor_cores": kernel.uses_tensor_cores}))


if __name__ == "__main__":
    main()
