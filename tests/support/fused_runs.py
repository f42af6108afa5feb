"""A decoder computed by fused operations over a paged pool, driven by hand: which tokens share a batch is the test's choice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from engine.describe import describe_decoder
from engine.device_batch import DeviceBatch
from engine.fused_forward import FusedForward
from engine.fused_weights import fuse_weights
from engine.model import LoadedModel
from engine.operations import Operations
from tests.support.packed_runs import Run

BLOCK_SIZE, NUM_BLOCKS = 16, 160
MAX_TOKENS, MAX_ROWS, MAX_POSITIONS = 512, 16, 320


def device_batch(chunks: Sequence[tuple[int, int, Sequence[int]]], *, num_seqs: int | None = None, num_tokens: int | None = None) -> DeviceBatch:
    """A batch of (first position, number of tokens, block table), padded to so many chunks, of one token each as long as there are any, and tokens."""
    missing = (num_seqs or len(chunks)) - len(chunks)
    null = [(0, 1, [NUM_BLOCKS])] * missing
    chunks = [*chunks, *null]
    starts = list(accumulate((count for _, count, _ in chunks), initial=0))
    positions = [place for first, count, _ in chunks for place in range(first, first + count)]
    slots = [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for first, count, table in chunks for place in range(first, first + count)]
    padding = (num_tokens or len(positions)) - len(positions)
    assert padding >= 0, f"{len(positions)} tokens do not fit {num_tokens}"
    width = max(len(table) for _, _, table in chunks)
    return DeviceBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        first_positions=torch.tensor([first for first, _, _ in chunks], dtype=torch.int32),
        tables=torch.tensor([[*table, *[NUM_BLOCKS] * (width - len(table))] for _, _, table in chunks], dtype=torch.int32),
        positions=torch.tensor([*positions, *[0] * padding], dtype=torch.int32),
        slots=torch.tensor([*slots, *[NUM_BLOCKS * BLOCK_SIZE] * padding], dtype=torch.int64),
        max_query_len=max(count for _, count, _ in chunks),
        max_kv_len=max(first + count for first, count, _ in chunks),
    )


class FusedModel:
    """A forward over a pool full of NaN but for its null block: a slot that is read before it is written shows."""

    def __init__(self, model: LoadedModel, operations: Operations) -> None:
        """The model's weights are fused in its own memory."""
        self.pool = torch.full((NUM_BLOCKS + 1, model.num_layers, 2, BLOCK_SIZE, model.num_kv_heads, model.head_dim), torch.nan, dtype=model.dtype)
        self.pool[NUM_BLOCKS] = 0.0
        self.decoder = fuse_weights(describe_decoder(model.module))
        self.pool = self.pool.to(self.decoder.embedding.device)
        self.forward = FusedForward(
            self.decoder,
            self.pool,
            operations,
            max_tokens=MAX_TOKENS,
            max_rows=MAX_ROWS,
            max_positions=MAX_POSITIONS,
            softcap=model.final_softcap,
        )

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[Run, int]], *, num_padding: int = 0) -> None:
        """Computes the next tokens of some runs, and `num_padding` chunks of padding, in one batch; a run that reaches its end gets logits and a token."""
        chunks = [(run.num_computed, count, run.block_table) for run, count in work]
        num_tokens = sum(count for _, count in work) + num_padding
        batch = device_batch(chunks, num_seqs=len(work) + num_padding, num_tokens=num_tokens)
        ids = [token for run, count in work for token in run.token_ids[run.num_computed : run.num_computed + count]]
        ends = list(accumulate(count for _, count in work))
        for run, count in work:
            run.num_computed += count
        ended = [(run, end - 1) for (run, _), end in zip(work, ends, strict=True) if run.num_computed == len(run.token_ids)]
        rows = torch.tensor([row for _, row in ended] or [0])
        hidden = self.forward.hidden_states(torch.tensor([*ids, *[0] * num_padding]), batch, rows)
        for (run, _), row in zip(ended, self.forward.logits(hidden), strict=False):
            run.logits.append(row.clone())
            run.token_ids.append(int(row.argmax()))

    def generate(self, run: Run, num_tokens: int, chunk: int = 10_000) -> None:
        """Runs one alone, its prompt in chunks, until it has `num_tokens` rows of logits."""
        while len(run.logits) < num_tokens:
            self.step([(run, min(chunk, len(run.token_ids) - run.num_computed))])
