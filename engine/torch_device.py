"""The device that computes steps with torch: one packed forward, then sampling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import torch

from engine.activations import steady_activations
from engine.attention import AttentionBackend, PackedBatch, TorchAttention
from engine.config import EngineConfig
from engine.errors import SequenceError
from engine.kernels.build import default_cache_dir, find_compiler
from engine.kernels.native import NativeAttention, supports_head_dim
from engine.kv_cache import HostKvCache
from engine.model import LoadedModel
from engine.sampler import sample
from engine.sampling_params import SampledToken
from engine.step import Chunk, StepPlan, StepResult

_log = logging.getLogger(__name__)

_ROW_MULTIPLE = 16
"""Rows of a float32 product. With MKL a row's bits are the same for every count of rows that is a multiple of this, and not for small odd counts."""


class TorchDevice:
    """Implements engine.step.Device on CPU; called on the engine thread only.

    With float32 weights and the native kernel a token's logits have the same bits whatever shares its batch and however its prompt was cut.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel, kv_cache: HostKvCache) -> None:
        """`kv_cache` has the model's shape and dtype. Raises KernelBuildError when the native kernel is asked for and cannot be had."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        layout = kv_cache.layout
        shape = (kv_cache.num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self._pool = torch.frombuffer(kv_cache.memory, dtype=model.dtype).view(shape)
        self._blocks = kv_cache.blocks
        self._block_size = layout.block_size
        self._model = model
        self._decoder = model.module.model
        self._lm_head = model.module.lm_head
        self._pads_rows = model.dtype == torch.float32
        if self._pads_rows:
            steady_activations(model.module)
        self._attention = _attention_backend(config, self._pool, model)
        _log.info("attention backend %s, %s, batch-invariant: %s", self.attention_backend, layout.dtype, self.batch_invariant)

    @property
    def attention_backend(self) -> str:
        """The one in force: "native" or "torch"."""
        return self._attention.name

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's logits have the same bits in every batch, as the class says."""
        return self._pads_rows and self._attention.batch_invariant and self._model.module.config.hidden_act == "silu"

    def execute(self, plan: StepPlan) -> StepResult:
        """Copies blocks, computes all chunks in one forward and samples where asked.

        A chunk with a token id or a position that the model does not have, or with unusable logits, fails alone; its KV must not be used. Block ids that the
        pool does not have are a broken invariant and raise IndexError.
        """
        with torch.inference_mode():
            for source, destination in plan.copies:
                np.copyto(self._blocks[destination], self._blocks[source])
            failed: dict[int, Exception] = {index: error for index, chunk in enumerate(plan.chunks) if (error := self._error_of(chunk)) is not None}
            indices = [index for index in range(len(plan.chunks)) if index not in failed]
            sampled: list[SampledToken | None] = [None] * len(plan.chunks)
            if indices:
                self._compute(plan.chunks, indices, sampled, failed)
            return StepResult(sampled, failed)

    def _compute(self, chunks: Sequence[Chunk], indices: Sequence[int], sampled: list[SampledToken | None], failed: dict[int, Exception]) -> None:
        """Computes the chunks at `indices`; fills in their tokens or errors."""
        live = [chunks[index] for index in indices]
        batch = self._pack(live)
        hidden = self._forward(live, batch)
        asked = [(number, chunk.sample) for number, chunk in enumerate(live) if chunk.sample is not None]
        if not asked:
            return
        last_rows = [int(batch.chunk_starts[number + 1]) - 1 for number, _ in asked]
        outcomes = sample(self._logits(hidden, last_rows), [row for _, row in asked])
        for (number, _), outcome in zip(asked, outcomes, strict=True):
            if isinstance(outcome, SampledToken):
                sampled[indices[number]] = outcome
            else:
                failed[indices[number]] = outcome

    def _forward(self, chunks: Sequence[Chunk], batch: PackedBatch) -> torch.Tensor:
        """Hidden states [rows, hidden size], padding rows included."""
        num_rows = self._padded(batch.num_tokens)
        token_ids = np.zeros(num_rows, np.int64)
        positions = np.zeros(num_rows, np.int64)
        for number, chunk in enumerate(chunks):
            start, end = batch.chunk_starts[number], batch.chunk_starts[number + 1]
            token_ids[start:end] = chunk.token_ids
            positions[start:end] = np.arange(chunk.first_position, chunk.first_position + len(chunk.token_ids))
        self._attention.begin(batch)
        output = self._decoder(
            input_ids=torch.from_numpy(token_ids)[None], position_ids=torch.from_numpy(positions)[None], use_cache=False, paged_attention=self._attention
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Float32 logits of some rows, [len(rows), vocabulary]."""
        padded = [*rows, *[rows[0]] * (self._padded(len(rows)) - len(rows))]
        logits: torch.Tensor = self._lm_head(hidden[padded])
        return logits[: len(rows)].float()

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE if self._pads_rows else num_rows

    def _pack(self, chunks: Sequence[Chunk]) -> PackedBatch:
        tables = [chunk.block_table[: self._num_blocks(chunk)] for chunk in chunks]
        flat = np.fromiter(chain.from_iterable(tables), np.int32)
        if flat.min() < 0 or flat.max() >= self._pool.shape[0]:
            raise IndexError(f"block ids {flat.min()} to {flat.max()} are not all in a pool of {self._pool.shape[0]}")
        return PackedBatch(
            chunk_starts=np.fromiter(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0), np.int32),
            first_positions=np.fromiter((chunk.first_position for chunk in chunks), np.int32),
            table_starts=np.fromiter(accumulate((len(table) for table in tables[:-1]), initial=0), np.int32),
            tables=flat,
        )

    def _num_blocks(self, chunk: Chunk) -> int:
        """Blocks up to the chunk's last token; raises IndexError if its table is shorter."""
        num_needed = -(-(chunk.first_position + len(chunk.token_ids)) // self._block_size)
        if len(chunk.block_table) < num_needed:
            raise IndexError(f"{chunk.seq_id}: a chunk that ends in block {num_needed} has a table of {len(chunk.block_table)}")
        return num_needed

    def _error_of(self, chunk: Chunk) -> SequenceError | None:
        if not chunk.token_ids:
            return SequenceError("a chunk has no tokens")
        if min(chunk.token_ids) < 0 or max(chunk.token_ids) >= self._model.vocab_size:
            return SequenceError(f"token ids {min(chunk.token_ids)} to {max(chunk.token_ids)} are not all in a vocabulary of {self._model.vocab_size}")
        end = chunk.first_position + len(chunk.token_ids)
        if chunk.first_position < 0 or end > self._model.max_position_embeddings:
            return SequenceError(f"positions {chunk.first_position} to {end - 1} are not all below the model's {self._model.max_position_embeddings}")
        return None


def _attention_backend(config: EngineConfig, pool: torch.Tensor, model: LoadedModel) -> AttentionBackend:
    if config.attention_backend == "torch":
        return TorchAttention(pool)
    if config.attention_backend == "auto":
        if find_compiler(config.compiler) is None:
            _log.warning(
                "no C++ compiler %r: attention runs on torch, slower and not batch-invariant; install one, for instance the package g++", config.compiler
            )
            return TorchAttention(pool)
        if not supports_head_dim(model.head_dim):
            _log.warning("head_dim %d is not one of the native kernel's: attention runs on torch, slower and not batch-invariant", model.head_dim)
            return TorchAttention(pool)
    return NativeAttention(pool, model.num_heads, torch.get_num_threads(), config.cache_dir or default_cache_dir(), config.compiler)
