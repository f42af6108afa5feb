"""Attention over one packed batch of tokens and a paged KV pool, as transformers' models call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

ATTENTION_NAME = "tandem_paged"
"""Name in transformers' attention interface. It has no mask function there, so no mask is built: a chunk's positions are its mask."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Where each chunk of a step lies in the packed batch and in the pool. Rows from `num_tokens` on are padding and touch no KV."""

    chunk_starts: npt.NDArray[np.int32]
    """[num_chunks + 1] index of a chunk's first token in the batch; the last entry is the number of tokens."""
    first_positions: npt.NDArray[np.int32]
    """[num_chunks] position of that token in its sequence."""
    table_starts: npt.NDArray[np.int32]
    """[num_chunks] index of a chunk's block table in `tables`."""
    tables: npt.NDArray[np.int32]
    """Pool block ids of all chunks, one after the other."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.chunk_starts[-1])


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer gets from queries and keys to softmax."""

    scaling: float
    window: int | None = None
    """A token sees this many keys, its own the last; keys before them are not read. None: all."""
    softcap: float | None = None
    """A score goes through `softcap * tanh(score / softcap)`."""


class AttentionBackend(Protocol):
    """Writes a layer's keys and values into the pool and attends to them."""

    name: str
    batch_invariant: bool
    """A row's bits do not depend on what else is in the batch or on how its prompt was cut."""

    def begin(self, batch: PackedBatch) -> None:
        """Called once before the layers of a step."""
        ...

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, scores: Scores) -> None:
        """query and out [tokens, num_heads, head_dim], key and value [tokens, num_kv_heads, head_dim]; padding rows of `out` stay as they are."""
        ...


class TorchAttention:
    """The reference: gathers each chunk's keys and values and computes in float32, chunk by chunk."""

    name = "torch"
    batch_invariant = False

    def __init__(self, pool: torch.Tensor) -> None:
        """`pool` is [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""
        self._pool = pool
        self._chunks: list[tuple[int, int, int, torch.Tensor, torch.Tensor]] = []

    def begin(self, batch: PackedBatch) -> None:
        """Resolves each chunk's slots: (start, end, first position, pool block and offset of positions 0 to the chunk's last)."""
        self._chunks = []
        for index, first in enumerate(batch.first_positions.tolist()):
            start, end = int(batch.chunk_starts[index]), int(batch.chunk_starts[index + 1])
            positions = torch.arange(first + end - start)
            block_size = self._pool.shape[3]
            table = torch.from_numpy(batch.tables[batch.table_starts[index] :]).long()
            self._chunks.append((start, end, first, table[positions // block_size], positions % block_size))

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, scores: Scores) -> None:
        """See AttentionBackend."""
        for start, end, first, blocks, offsets in self._chunks:
            self._pool[blocks[first:], layer, 0, offsets[first:]] = key[start:end]
            self._pool[blocks[first:], layer, 1, offsets[first:]] = value[start:end]
            seen = 0 if scores.window is None else max(0, first - scores.window + 1)
            keys, values = (self._pool[blocks[seen:], layer, which, offsets[seen:]].float() for which in (0, 1))
            out[start:end] = attend_causal(query[start:end].float(), keys, values, first - seen, scores).to(out.dtype)


def attend_causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_position: int, how: Scores) -> torch.Tensor:
    """Softmax attention of queries [tokens, heads, dim] at `first_position` on, to keys and values [positions, kv heads, dim] up to their own."""
    num_tokens, num_heads, head_dim = query.shape
    num_positions, num_kv_heads, _ = keys.shape
    grouped = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("tkgd,pkd->kgtp", grouped * how.scaling, keys)
    if how.softcap is not None:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    distance = torch.arange(first_position, first_position + num_tokens)[:, None] - torch.arange(num_positions)
    visible = (distance >= 0) & (distance < (how.window or num_positions))
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    return torch.einsum("kgtp,pkd->tkgd", weights, values).reshape(num_tokens, num_heads, head_dim)


def register_paged_attention() -> None:
    """Makes `ATTENTION_NAME` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _paged_attention)


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged_attention: AttentionBackend,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, num_heads, tokens, head_dim], key and value alike; returns [1, tokens, num_heads, head_dim]. Padding rows come out as zeros."""
    if attention_mask is not None:
        raise ValueError("transformers built a mask, which paged attention does not read")
    packed = query[0].transpose(0, 1)
    out = torch.zeros(packed.shape, dtype=query.dtype)
    softcap = getattr(module, "attn_logit_softcapping", None)  # Gemma 3 keeps the configured cap there and does not pass it on
    scores = Scores(scaling, sliding_window, softcap)
    paged_attention.attend(module.layer_idx, packed, key[0].transpose(0, 1), value[0].transpose(0, 1), out, scores)
    return out[None], None
