"""Operations by Triton's kernels: for CUDA, and in Triton's interpreter for tests."""

from __future__ import annotations

import torch

from engine.attention import Scores
from engine.decoder import Activation, Norm
from engine.device_batch import DeviceBatch
from engine.kernels.triton.gated import gated
from engine.kernels.triton.kv_write import write_kv
from engine.kernels.triton.matmul import matmul
from engine.kernels.triton.paged_decode import paged_decode, workspace_of
from engine.kernels.triton.paged_prefill import paged_prefill
from engine.kernels.triton.rms_norm import add_rms_norm, head_norm
from engine.kernels.triton.rope import rotate
from engine.operations import torch_linear


class TritonOperations:
    """See Operations. What it keeps is the decode kernel's workspace, so that a CUDA graph finds it where it was."""

    attention_backend = "triton"

    def __init__(self, *, num_heads: int, head_dim: int, max_num_seqs: int, max_kv_len: int, device: torch.device, batch_invariant: bool = False) -> None:
        """For decode steps of up to so many sequences and keys each.

        With `batch_invariant` products keep one order of sums and decode runs on prefill's attention kernel, whose tiles have one shape; else products are
        cuBLAS's.
        """
        self.batch_invariant = batch_invariant
        self._workspace = torch.empty(0, device=device) if batch_invariant else workspace_of(max_num_seqs, num_heads, head_dim, max_kv_len, device)

    @property
    def num_static_bytes(self) -> int:
        """Memory that is held from the start."""
        return self._workspace.nbytes

    def norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, out: torch.Tensor) -> None:
        """See Operations."""
        add_rms_norm(x, residual, norm.weight, norm.epsilon, out)

    def head_norm(self, heads: torch.Tensor, norm: Norm) -> None:
        """See Operations."""
        head_norm(heads, norm.weight, norm.epsilon)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
        """See Operations."""
        rotate(query, key, cos, sin, positions)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """See Operations."""
        if self.batch_invariant:
            matmul(x, weight, bias, out)
        else:
            torch_linear(x, weight, bias, out)

    def gated(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """See Operations."""
        gated(gate_up, activation, out)

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, batch: DeviceBatch) -> None:
        """See Operations."""
        write_kv(key, value, pool, layer, batch.slots)

    def attend(self, query: torch.Tensor, pool: torch.Tensor, layer: int, batch: DeviceBatch, scores: Scores, out: torch.Tensor) -> None:
        """See Operations."""
        if batch.max_query_len == 1 and not self.batch_invariant:
            paged_decode(query, pool, layer, batch, scores, out, self._workspace)
        else:
            paged_prefill(query, pool, layer, batch, scores, out)
