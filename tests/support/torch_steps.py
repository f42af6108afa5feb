"""Driving a TorchDevice by hand: sequences as lists of tokens and block tables, steps as chosen by the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from engine.attention import PackedBatch
from engine.build import build_torch_engine_parts
from engine.config import AttentionBackendName, Dtype, EngineConfig
from engine.sampling_params import SampledToken, SamplingParams
from engine.step import Chunk, SampleRow, StepPlan, StepResult
from engine.torch_device import TorchDevice

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def tiny_device(model: Path, kernel_cache: Path, *, backend: AttentionBackendName = "native", dtype: Dtype = "auto", num_threads: int = 1) -> TorchDevice:
    """A device with a pool of 128 blocks of 16 tokens."""
    config = EngineConfig(
        model, dtype=dtype, num_blocks=128, attention_backend=backend, num_threads=num_threads, cache_dir=kernel_cache, max_prefill_tokens_per_step=512
    )
    return build_torch_engine_parts(config)[2]


@dataclass(slots=True)
class Driven:
    """A sequence whose chunks the test decides; `num_computed` tokens have KV."""

    seq_id: str
    token_ids: list[int]
    block_table: tuple[int, ...]
    params: SamplingParams = GREEDY
    num_computed: int = 0
    sampled: list[SampledToken] = field(default_factory=list)

    def chunk(self, num_tokens: int) -> Chunk:
        """The next `num_tokens` tokens; asks for a sample when they reach the end."""
        end = self.num_computed + num_tokens
        num_prompt_tokens = len(self.token_ids) - len(self.sampled)
        rows = (SampleRow(self.params, end, self.token_ids, num_prompt_tokens),) if end == len(self.token_ids) else ()
        return Chunk(self.seq_id, self.token_ids[self.num_computed : end], self.num_computed, self.block_table, rows)


def execute(device: TorchDevice, *chunks: Chunk, copies: Sequence[tuple[int, int]] = ()) -> StepResult:
    """Runs one step and waits for it."""
    return device.launch(StepPlan(0, chunks, copies)).result()


def step(device: TorchDevice, work: list[tuple[Driven, int]]) -> None:
    """Runs one step of (sequence, tokens to compute), in this order, and moves the sequences on."""
    result = execute(device, *(sequence.chunk(num_tokens) for sequence, num_tokens in work))
    assert result.failed == {}
    for (sequence, num_tokens), tokens in zip(work, result.sampled, strict=True):
        sequence.num_computed += num_tokens
        sequence.sampled.extend(tokens)
        sequence.token_ids.extend(token.token_id for token in tokens)


def generate(device: TorchDevice, sequence: Driven, num_tokens: int, chunk: int = 10_000) -> list[int]:
    """Runs one sequence alone, its prompt in chunks of at most `chunk` tokens, until it has `num_tokens` more."""
    while len(sequence.sampled) < num_tokens:
        step(device, [(sequence, min(chunk, len(sequence.token_ids) - sequence.num_computed))])
    return [token.token_id for token in sequence.sampled]


class LogitsRecorder:
    """Keeps the logits of every row that a device samples from or reads log probabilities of, in order."""

    def __init__(self, device: TorchDevice) -> None:
        self.rows: list[torch.Tensor] = []
        self.sizes: list[int] = []
        """Rows computed at a time."""
        self._forward = device._forward  # the seam between forward and sampling has no public name
        device._forward = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> object:
        return getattr(self._forward, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The forward's own."""
        logits = self._forward.logits(hidden)
        self.rows.extend(logits.clone())
        self.sizes.append(len(logits))
        return logits


def packed_batch(chunks: list[tuple[int, int, list[int]]]) -> PackedBatch:
    """A batch of (first position, number of tokens, block table)."""
    starts = np.cumsum([0, *(count for _, count, _ in chunks)], dtype=np.int32)
    tables = np.array([block for _, _, table in chunks for block in table], np.int32)
    table_starts = np.cumsum([0, *(len(table) for _, _, table in chunks[:-1])], dtype=np.int32)
    return PackedBatch(starts, np.array([first for first, _, _ in chunks], np.int32), table_starts, tables)
