"""A loaded model over a paged pool, driven by hand: which tokens share a batch is the test's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from engine.attention import AttentionBackend, TorchAttention
from engine.config import AttentionBackendName
from engine.kernels.native import NativeAttention
from engine.model import LoadedModel
from tests.support.torch_steps import packed_batch

_BLOCK_SIZE, _NUM_BLOCKS = 16, 160


@dataclass(slots=True)
class Run:
    """A sequence; `num_computed` of its tokens have KV, and `logits` has a row of each token that was asked for one."""

    token_ids: list[int]
    block_table: list[int]
    num_computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class PackedModel:
    """The model, its attention and a pool full of NaN: a slot that is read before it is written shows."""

    def __init__(self, model: LoadedModel, kernel_cache: Path, backend: AttentionBackendName = "native", num_threads: int = 1) -> None:
        self._model = model
        pool = torch.full((_NUM_BLOCKS, model.num_layers, 2, _BLOCK_SIZE, model.num_kv_heads, model.head_dim), torch.nan, dtype=model.dtype)
        self._attention: AttentionBackend = (
            NativeAttention(pool, model.num_heads, num_threads, kernel_cache, "c++") if backend == "native" else TorchAttention(pool)
        )

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[Run, int]]) -> None:
        """Computes the next tokens of some runs in one batch; a run that reaches its end gets a row of logits and, greedily, a token."""
        self._attention.begin(packed_batch([(run.num_computed, count, run.block_table) for run, count in work]))
        ids = [token for run, count in work for token in run.token_ids[run.num_computed : run.num_computed + count]]
        positions = [place for run, count in work for place in range(run.num_computed, run.num_computed + count)]
        hidden = self._model.hidden_states(np.array(ids), np.array(positions), self._attention)
        end = 0
        ended: list[tuple[Run, int]] = []
        for run, count in work:
            end, run.num_computed = end + count, run.num_computed + count
            if run.num_computed == len(run.token_ids):
                ended.append((run, end - 1))
        if not ended:
            return
        for (run, _), row in zip(ended, self._model.logits(hidden[[row for _, row in ended]]), strict=True):
            run.logits.append(row.clone())
            run.token_ids.append(int(row.argmax()))

    def generate(self, run: Run, num_tokens: int, chunk: int = 10_000) -> None:
        """Runs one alone, its prompt in chunks, until it has `num_tokens` rows of logits."""
        while len(run.logits) < num_tokens:
            self.step([(run, min(chunk, len(run.token_ids) - run.num_computed))])
