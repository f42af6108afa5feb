"""Attention of prefill and decode kernels over a paged pool against float64, and the bits that batch and cut must not change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.attention import Scores, attend_causal
from engine.device_batch import DeviceBatch
from engine.kernels.triton.cost import Cost
from engine.kernels.triton.paged_decode import SPLIT, paged_decode, paged_decode_cost, workspace_of
from engine.kernels.triton.paged_prefill import paged_prefill, paged_prefill_cost

_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
_LAYER = 1


class Sequences:
    """Keys and values of some sequences in a pool that is NaN elsewhere, but for the null block, its last one."""

    def __init__(
        self, lengths: Sequence[int], *, heads: tuple[int, int] = (6, 2), head_dim: int = 16, block_size: int = 16, dtype: torch.dtype = torch.float32
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        self.num_heads, self.num_kv_heads = heads
        blocks = [-(-length // block_size) for length in lengths]
        self.pool = torch.full((sum(blocks) + 1, 2, 2, block_size, self.num_kv_heads, head_dim), torch.nan, dtype=dtype)
        self.pool[-1] = 0
        order = torch.randperm(sum(blocks), generator=generator)
        self.tables = torch.full((len(lengths), max(blocks)), sum(blocks), dtype=torch.int32)
        self.query, self.keys, self.values = (list[torch.Tensor]() for _ in range(3))
        for index, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
            first = sum(blocks[:index])
            self.tables[index, :count] = order[first : first + count]
            for rows, number in ((self.query, self.num_heads), (self.keys, self.num_kv_heads), (self.values, self.num_kv_heads)):
                rows.append(torch.randn(length, number, head_dim, generator=generator).to(dtype))
            places = torch.arange(length)
            table = self.tables[index].long()[places // block_size]
            self.pool[table, _LAYER, 0, places % block_size] = self.keys[index]
            self.pool[table, _LAYER, 1, places % block_size] = self.values[index]

    def batch(self, chunks: Sequence[tuple[int, int, int]]) -> tuple[torch.Tensor, DeviceBatch]:
        """Queries of chunks (sequence, first position, tokens), and where they lie."""
        query = torch.cat([self.query[seq][first : first + count] for seq, first, count in chunks])
        counts = torch.tensor([0, *(count for _, _, count in chunks)])
        empty = torch.empty(0, dtype=torch.int64)
        return query, DeviceBatch(
            query_starts=counts.cumsum(0).int(),
            first_positions=torch.tensor([first for _, first, _ in chunks], dtype=torch.int32),
            tables=self.tables[[seq for seq, _, _ in chunks]],
            positions=empty.int(),
            slots=empty,
            max_query_len=max(count for _, _, count in chunks),
            max_kv_len=max(first + count for _, first, count in chunks),
        )

    def prefill(self, chunks: Sequence[tuple[int, int, int]], scores: Scores) -> torch.Tensor:
        query, batch = self.batch(chunks)
        out = torch.full_like(query, torch.nan)
        paged_prefill(query, self.pool, _LAYER, batch, scores, out)
        return out

    def decode(self, chunks: Sequence[tuple[int, int]], scores: Scores) -> torch.Tensor:
        query, batch = self.batch([(seq, position, 1) for seq, position in chunks])
        out = torch.full_like(query, torch.nan)
        workspace = workspace_of(len(chunks), self.num_heads, query.shape[2], batch.max_kv_len, query.device).fill_(torch.nan)
        paged_decode(query, self.pool, _LAYER, batch, scores, out, workspace)
        return out

    def expected(self, seq: int, first: int, count: int, scores: Scores) -> torch.Tensor:
        end = first + count
        return attend_causal(self.query[seq][first:end].double(), self.keys[seq][:end].double(), self.values[seq][:end].double(), first, scores)

    def assert_near(self, out: torch.Tensor, chunks: Sequence[tuple[int, int, int]], scores: Scores) -> None:
        expected = torch.cat([self.expected(*chunk, scores) for chunk in chunks])
        size = max(values.abs().max() for values in self.values)
        assert (out.double() - expected).abs().max() <= _TOLERANCE[out.dtype] * size


@pytest.mark.parametrize("dtype", _TOLERANCE)
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [((9, 3), 64, 16), ((4, 4), 80, 32), ((8, 1), 128, 8), ((6, 2), 16, 16), ((1, 1), 32, 64)])
def test_chunks_anywhere_in_their_sequences_are_near_float64(dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    sequences, scores = Sequences([70, 150, 5], heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype), Scores(head_dim**-0.5)
    chunks = [(0, 0, 70), (1, 64, 86), (2, 4, 1)]
    sequences.assert_near(sequences.prefill(chunks, scores), chunks, scores)


@pytest.mark.parametrize("dtype", _TOLERANCE)
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [((9, 3), 64, 16), ((4, 4), 80, 32), ((20, 1), 128, 8), ((6, 2), 16, 16)])
def test_single_tokens_are_near_float64_across_splits(dtype: torch.dtype, heads: tuple[int, int], head_dim: int, block_size: int) -> None:
    sequences = Sequences([SPLIT + 70, 3, SPLIT], heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    chunks, scores = [(0, SPLIT + 69), (1, 0), (2, SPLIT - 1), (1, 2)], Scores(head_dim**-0.5)
    sequences.assert_near(sequences.decode(chunks, scores), [(seq, position, 1) for seq, position in chunks], scores)


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (24, None), (64, 2.0), (65, None), (600, 30.0), (None, 0.5)])
def test_windows_and_soft_caps_are_those_of_the_reference(window: int | None, softcap: float | None) -> None:
    sequences, scores = Sequences([SPLIT + 100, 90]), Scores(0.25, window, softcap)
    chunks = [(0, SPLIT + 30, 70), (1, 0, 90)]
    sequences.assert_near(sequences.prefill(chunks, scores), chunks, scores)
    singles = [(0, SPLIT + 99), (0, SPLIT + 3), (1, 89)]
    sequences.assert_near(sequences.decode(singles, scores), [(seq, position, 1) for seq, position in singles], scores)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_gives_a_row_the_same_bits_in_every_cut_and_batch(dtype: torch.dtype, window: int | None) -> None:
    sequences, scores = Sequences([150, 33], dtype=dtype), Scores(0.25, window)
    whole = sequences.prefill([(0, 0, 150)], scores)
    for cuts in ([100, 50], [1, 64, 85], [149, 1]):
        ends = torch.tensor(cuts).cumsum(0).tolist()
        parts = [sequences.prefill([(1, 0, 33), (0, end - count, count)], scores)[33:] for end, count in zip(ends, cuts, strict=True)]
        assert torch.equal(torch.cat(parts), whole)
    singly = [sequences.prefill([(0, position, 1)], scores) for position in (0, 63, 64, 149)]
    assert torch.equal(torch.cat(singly), whole[[0, 63, 64, 149]]), "a batch-invariant run decodes by the same kernel"


def test_decode_gives_a_sequence_the_same_bits_in_every_batch() -> None:
    sequences, scores = Sequences([SPLIT + 20, 40, 2 * SPLIT + 5]), Scores(0.25)
    alone = sequences.decode([(0, SPLIT + 19)], scores)
    for chunks in ([(1, 39), (0, SPLIT + 19)], [(0, SPLIT + 19), (2, 2 * SPLIT + 4), (1, 3)]):
        place = chunks.index((0, SPLIT + 19))
        assert torch.equal(sequences.decode(chunks, scores)[place], alone[0])


def test_costs_count_what_is_seen() -> None:
    assert paged_decode_cost([10, 100], 4, 2, 8, 2, window=50) == Cost((2 * 60 * 2 + 2 * 2 * 4) * 8 * 2, 4 * 60 * 4 * 8)
    assert paged_prefill_cost([(2, 2)], 4, 2, 8, 2) == Cost((2 * 4 * 2 + 2 * 2 * 4) * 16, 4 * 7 * 4 * 8)
    assert paged_prefill_cost([(10, 2)], 4, 2, 8, 2, window=3) == Cost((2 * 4 * 2 + 2 * 2 * 4) * 16, 4 * 6 * 4 * 8)
