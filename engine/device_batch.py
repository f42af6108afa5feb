"""One packed batch of tokens as kernels read it: tensors on the device, of shapes that a CUDA graph can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Where each chunk of a step lies in the packed batch and in a pool [num_blocks + 1, num_layers, 2, block_size, num_kv_heads, head_dim].

    The pool's last block is the null block: padding writes to it, and is told to read from it.
    """

    query_starts: torch.Tensor
    """int32 [num_seqs + 1] index of a chunk's first token in the batch; the last entry is the number of tokens."""
    first_positions: torch.Tensor
    """int32 [num_seqs] position of that token in its sequence."""
    tables: torch.Tensor
    """int32 [num_seqs, max_blocks] pool block ids; the null block beyond what a sequence has."""
    positions: torch.Tensor
    """int32 [num_tokens]."""
    slots: torch.Tensor
    """int64 [num_tokens] block * block_size + offset, where a token's key and value go; padding goes to the null block."""
    max_query_len: int
    """A bound of the tokens of a chunk; 1: every chunk is one token."""
    max_kv_len: int
    """A bound of a chunk's first position plus its tokens: how far tables are read."""

    @property
    def num_seqs(self) -> int:
        """Chunks, those of padding included."""
        return len(self.first_positions)

    @property
    def num_tokens(self) -> int:
        """Tokens, those of padding included."""
        return len(self.positions)
