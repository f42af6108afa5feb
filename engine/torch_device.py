"""The device that computes steps with torch: one packed forward, then sampling, on a thread of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, chain

import numpy as np
import torch

from engine.attention import AttentionBackend, PackedBatch, TorchAttention
from engine.config import EngineConfig
from engine.errors import SequenceError
from engine.kernels.build import default_cache_dir, find_compiler
from engine.kernels.native import NativeAttention, supports_head_dim
from engine.kv_cache import HostKvCache
from engine.model import LoadedModel
from engine.sampler import prompt_logprobs, sample
from engine.sampling_params import SampledToken
from engine.step import Chunk, PromptRow, StepPlan, StepResult

_log = logging.getLogger(__name__)

_MAX_PROMPT_ROWS = 64
"""Rows of logits that are in memory at a time when a prompt's log probabilities are asked for."""


class TorchDevice:
    """Implements engine.step.Device on CPU.

    With float32 weights and the native kernel a token's logits have the same bits whatever shares its batch and however its prompt was cut.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel, kv_cache: HostKvCache) -> None:
        """`kv_cache` has the model's shape and dtype. Raises KernelBuildError when the native kernel is asked for and cannot be had."""
        num_threads = config.num_threads or torch.get_num_threads()
        layout = kv_cache.layout
        shape = (kv_cache.num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self._pool = torch.frombuffer(kv_cache.memory, dtype=model.dtype, count=math.prod(shape)).view(shape)
        self._blocks = kv_cache.blocks
        self._block_size = layout.block_size
        self._model = model
        # An id beyond the vocabulary, which some checkpoints name, is never sampled.
        self._eos_token_ids = frozenset(token_id for token_id in model.eos_token_ids if 0 <= token_id < model.vocab_size)
        self._attention = _attention_backend(config, self._pool, model, num_threads)
        # The number of threads is told there: OpenMP keeps it for each thread that calls it.
        self._thread = ThreadPoolExecutor(1, "device", initializer=torch.set_num_threads, initargs=(num_threads,))

    @property
    def attention_backend(self) -> str:
        """The one in force: "native" or "torch"."""
        return self._attention.name

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's logits have the same bits in every batch, as the class says."""
        return self._model.steady and self._attention.batch_invariant

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """See engine.step.Device.

        A chunk with a token id or a position that the model does not have, with unusable logits, or with parameters that leave no token, fails alone; its KV
        must not be used. Block ids that the pool does not have are a broken invariant: IndexError. Raises RuntimeError after `close`.
        """
        return self._thread.submit(self._execute, plan)

    def close(self) -> None:
        """Ends the device's thread, behind a step in flight. Idempotent."""
        self._thread.shutdown()

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        """Copies blocks, computes all chunks in one forward and samples where asked."""
        for source, destination in plan.copies:
            np.copyto(self._blocks[destination], self._blocks[source])
        failed: dict[int, Exception] = {index: error for index, chunk in enumerate(plan.chunks) if (error := self._error_of(chunk)) is not None}
        live = {index: chunk for index, chunk in enumerate(plan.chunks) if index not in failed}
        sampled: list[tuple[SampledToken, ...]] = [()] * len(plan.chunks)
        prompts: dict[int, tuple[SampledToken, ...]] = {}
        if live:
            hidden = dict(zip(live, self._forward(list(live.values())), strict=True))
            for index, chunk in live.items():
                if chunk.prompt is not None:
                    try:
                        prompts[index] = tuple(self._logprobs_of(chunk.prompt, hidden[index]))
                    except SequenceError as error:
                        failed[index] = error
            self._sample({index: chunk for index, chunk in live.items() if chunk.samples and index not in failed}, hidden, sampled, failed)
        return StepResult(sampled, failed, prompts)

    def _forward(self, chunks: Sequence[Chunk]) -> Sequence[torch.Tensor]:
        """Hidden states of each chunk, [tokens, hidden size]."""
        batch = self._pack(chunks)
        token_ids = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, batch.num_tokens)
        positions = np.concatenate([np.arange(chunk.first_position, chunk.first_position + len(chunk.token_ids)) for chunk in chunks])
        self._attention.begin(batch)
        return torch.split(self._model.hidden_states(token_ids, positions, self._attention), [len(chunk.token_ids) for chunk in chunks])

    def _sample(
        self, chunks: Mapping[int, Chunk], hidden: Mapping[int, torch.Tensor], sampled: list[tuple[SampledToken, ...]], failed: dict[int, Exception]
    ) -> None:
        """Fills in what `chunks`, all of which ask for tokens, got; everything goes by the index of a chunk in the plan."""
        if not chunks:
            return
        logits = self._model.logits(torch.stack([hidden[index][-1] for index in chunks]))
        outcomes = sample(logits, [chunk.samples for chunk in chunks.values()], self._eos_token_ids)
        for index, outcome in zip(chunks, outcomes, strict=True):
            if isinstance(outcome, SequenceError):
                failed[index] = outcome
            else:
                sampled[index] = outcome

    def _logprobs_of(self, prompt: PromptRow, hidden: torch.Tensor) -> Iterator[SampledToken]:
        for first in range(0, len(prompt.target_token_ids), _MAX_PROMPT_ROWS):
            targets = prompt.target_token_ids[first : first + _MAX_PROMPT_ROWS]
            yield from prompt_logprobs(self._model.logits(hidden[first : first + len(targets)]), targets, prompt.num_alternatives)

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
        token_ids = [*chunk.token_ids, *(chunk.prompt.target_token_ids if chunk.prompt is not None else ())]
        if min(token_ids) < 0 or max(token_ids) >= self._model.vocab_size:
            return SequenceError(f"token ids {min(token_ids)} to {max(token_ids)} are not all in a vocabulary of {self._model.vocab_size}")
        end = chunk.first_position + len(chunk.token_ids)
        if chunk.first_position < 0 or end > self._model.max_position_embeddings:
            return SequenceError(f"positions {chunk.first_position} to {end - 1} are not all below the model's {self._model.max_position_embeddings}")
        return None


def _attention_backend(config: EngineConfig, pool: torch.Tensor, model: LoadedModel, num_threads: int) -> AttentionBackend:
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
    return NativeAttention(pool, model.num_heads, num_threads, config.cache_dir or default_cache_dir(), config.compiler)
