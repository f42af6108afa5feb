"""The device that computes steps with torch: one packed forward, then sampling, on a thread of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, chain

import numpy as np
import torch

from engine.attention import PackedBatch
from engine.config import EngineConfig
from engine.errors import SequenceError
from engine.forward import Forward, NativeForward, module_forward, num_threads_of
from engine.kernels.build import default_cache_dir
from engine.kernels.native_decoder import NativeDecoder
from engine.kernels.native_sampling import NativeSampling
from engine.kv_cache import HostKvCache
from engine.model import LoadedModel
from engine.sampler import prompt_logprobs, sample
from engine.sampling_params import SampledToken
from engine.step import Chunk, PromptRow, StepPlan, StepResult

_MAX_PROMPT_ROWS = 64
"""Rows of logits that are in memory at a time when a prompt's log probabilities are asked for."""


class TorchDevice:
    """Implements engine.step.Device on CPU.

    With the native decoder, and with float32 weights and the native attention kernel, a token's logits have the same bits whatever shares its batch and however
    its prompt was cut.
    """

    def __init__(self, config: EngineConfig, model: LoadedModel, kv_cache: HostKvCache, native: NativeDecoder | None = None) -> None:
        """`kv_cache` has the model's shape and dtype; `native` computes the model, its module else. Raises KernelBuildError."""
        layout = kv_cache.layout
        shape = (kv_cache.num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self._pool = torch.frombuffer(kv_cache.memory, dtype=model.dtype, count=math.prod(shape)).view(shape)
        self._blocks = kv_cache.blocks
        self._block_size = layout.block_size
        self._model = model
        # An id beyond the vocabulary, which some checkpoints name, is never sampled.
        self._eos_token_ids = frozenset(token_id for token_id in model.eos_token_ids if 0 <= token_id < model.vocab_size)
        self._forward: Forward = module_forward(config, model, self._pool) if native is None else NativeForward(native, self._pool, model.final_softcap)
        # Where the decoder could be compiled, so can this.
        self._sampling = None if native is None else NativeSampling(config.cache_dir or default_cache_dir(), config.compiler)
        # The number of torch's threads is told there: OpenMP keeps it for each thread that calls it. Behind the native decoder, which has its own, torch only
        # samples: among threads a row's few operations wait for each other, for milliseconds where others have the cores.
        num_torch_threads = num_threads_of(config) if native is None else 1
        self._thread = ThreadPoolExecutor(1, "device", initializer=torch.set_num_threads, initargs=(num_torch_threads,))

    @property
    def forward(self) -> str:
        """What computes the model: "native" or "module"."""
        return self._forward.name

    @property
    def attention_backend(self) -> str:
        """The one in force: "native" or "torch"."""
        return self._forward.attention_backend

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's logits have the same bits in every batch, as the class says."""
        return self._forward.batch_invariant

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
            hidden, counts = self._hidden_states(list(live.values()))
            ends = dict(zip(live, accumulate(counts), strict=True))
            for (index, chunk), count in zip(live.items(), counts, strict=True):
                if chunk.prompt is not None:
                    try:
                        prompts[index] = tuple(self._logprobs_of(chunk.prompt, hidden[ends[index] - count : ends[index]]))
                    except SequenceError as error:
                        failed[index] = error
            asking = {index: chunk for index, chunk in live.items() if chunk.samples and index not in failed}
            if asking:
                last = [ends[index] - 1 for index in asking]
                self._sample(asking, hidden if len(last) == len(hidden) else hidden[last], sampled, failed)
        return StepResult(sampled, failed, prompts)

    def _hidden_states(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, Sequence[int]]:
        """Hidden states of all chunks, [rows, hidden size], and how many rows each has: all its tokens where it asks for its prompt's log probabilities, else
        the last one.
        """
        batch = self._pack(chunks)
        token_ids = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int32, batch.num_tokens)
        ends = batch.chunk_starts[1:].tolist()
        counts = [len(chunk.token_ids) if chunk.prompt is not None else 1 for chunk in chunks]
        rows = np.fromiter(chain.from_iterable(range(end - count, end) for end, count in zip(ends, counts, strict=True)), np.int32)
        return self._forward.hidden_states(token_ids, batch, rows), counts

    def _sample(self, chunks: Mapping[int, Chunk], hidden: torch.Tensor, sampled: list[tuple[SampledToken, ...]], failed: dict[int, Exception]) -> None:
        """Fills in what `chunks`, all of which ask for tokens, got, by the index of a chunk in the plan; row i of `hidden` is the i-th chunk's last."""
        logits = self._forward.logits(hidden)
        outcomes = sample(logits, [chunk.samples for chunk in chunks.values()], self._eos_token_ids, self._sampling)
        for index, outcome in zip(chunks, outcomes, strict=True):
            if isinstance(outcome, SequenceError):
                failed[index] = outcome
            else:
                sampled[index] = outcome

    def _logprobs_of(self, prompt: PromptRow, hidden: torch.Tensor) -> Iterator[SampledToken]:
        for first in range(0, len(prompt.target_token_ids), _MAX_PROMPT_ROWS):
            targets = prompt.target_token_ids[first : first + _MAX_PROMPT_ROWS]
            yield from prompt_logprobs(self._forward.logits(hidden[first : first + len(targets)]), targets, prompt.num_alternatives)

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
