"""What gpu-check does with Triton's kernels: each against float64 on the device, then its time against what the device can move and multiply."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.attention import Scores, attend_causal
from engine.decoder import Activation
from engine.device_batch import DeviceBatch
from engine.kernels.triton.block_gather import copy_blocks_cost, gather_blocks
from engine.kernels.triton.cost import Cost
from engine.kernels.triton.gated import gated, gated_cost
from engine.kernels.triton.kv_write import write_kv, write_kv_cost
from engine.kernels.triton.matmul import matmul, matmul_cost
from engine.kernels.triton.paged_decode import paged_decode, paged_decode_cost, workspace_of
from engine.kernels.triton.paged_prefill import paged_prefill, paged_prefill_cost
from engine.kernels.triton.rms_norm import add_rms_norm, add_rms_norm_cost
from engine.kernels.triton.rope import rotate, rotate_cost

_BLOCK_SIZE, _LAYER = 16, 1
_MAX_ERROR = 2.0**-6
"""Of the greatest value, in bfloat16."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes of one layer, and of the loads that are timed."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    num_tokens: int
    """Of a prompt, and of what is done row by row."""
    batch: int
    context: int
    rounds: int
    copied_bytes: int
    side: int
    """Of the matrices that tell the device's rate."""

    @property
    def hidden_size(self) -> int:
        """Of the residual stream."""
        return self.num_heads * self.head_dim


LLAMA_8B = Sizes(32, 8, 128, 14336, 4096, 64, 4096, 20, 1 << 30, 8192)
SMALL = Sizes(6, 2, 16, 40, 70, 3, 90, 2, 1 << 16, 64)
"""What tests run on CPU."""


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel and one load."""

    name: str
    run: Callable[[], None]
    cost: Cost
    error: Callable[[], float]
    """Of what `run` wrote, over the greatest value, against float64."""


class Kernels:
    """All cases on one device; `seconds_of` times a launch."""

    def __init__(self, device: torch.device, sizes: Sizes) -> None:
        self._device = device
        self._sizes = sizes
        self._random = torch.Generator(device).manual_seed(0)

    def ceilings(self) -> tuple[float, float]:
        """Bytes/s of a copy, read and written, and FLOP/s of bfloat16 products by torch."""
        source = torch.empty(self._sizes.copied_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        copy_s = self.seconds_of(lambda: target.copy_(source))
        one, other = self._normal(self._sizes.side, self._sizes.side), self._normal(self._sizes.side, self._sizes.side)
        into = torch.empty_like(one)
        product_s = self.seconds_of(lambda: torch.mm(one, other, out=into))
        return 2 * source.nbytes / copy_s, 2 * self._sizes.side**3 / product_s

    def cases(self) -> Iterator[Case]:
        """One after the other, so that their memory is not held together."""
        yield self._norm()
        yield self._rotation()
        yield self._gates()
        yield self._writing()
        yield self._gathering()
        yield self._prefill()
        yield self._decode()
        for num_rows in (1, self._sizes.batch):
            yield self._product(num_rows)

    def rows(self) -> Iterator[dict[str, float | str]]:
        """For a table and a file: error, microseconds, and parts of the ceilings, of which the greater one is what the kernel reaches."""
        bandwidth, rate = self.ceilings()
        for case in self.cases():
            case.run()
            error = case.error()
            seconds = self.seconds_of(case.run)
            moved, computed = case.cost.num_bytes / seconds, case.cost.num_operations / seconds
            yield {
                "kernel": case.name,
                "error": round(error, 5),
                "us": round(seconds * 1e6, 1),
                "gb_per_s": round(moved / 1e9, 1),
                "tflop_per_s": round(computed / 1e12, 2),
                "of_bandwidth": round(moved / bandwidth, 3),
                "of_products": round(computed / rate, 3),
            }

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Median of a launch, behind a few that are not counted."""
        times: list[float] = []
        for _ in range(self._sizes.rounds + 3):
            if self._device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                run()
                end.record()
                end.synchronize()
                times.append(float(begin.elapsed_time(end)) / 1e3)
            else:
                started = time.perf_counter()
                run()
                times.append(time.perf_counter() - started)
        return statistics.median(times[3:])

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random, device=self._device).to(torch.bfloat16)

    def _norm(self) -> Case:
        x, weight = self._normal(self._sizes.num_tokens, self._sizes.hidden_size), torch.ones(self._sizes.hidden_size, device=self._device)
        residual, out = torch.zeros_like(x, dtype=torch.float32), torch.empty_like(x)

        def error() -> float:
            wide = residual.double()
            return _error(out, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt())

        return Case(
            "add_rms_norm",
            lambda: add_rms_norm(x, residual, weight, 1e-5, out),
            add_rms_norm_cost(self._sizes.num_tokens, self._sizes.hidden_size, 2, 4),
            error,
        )

    def _rotation(self) -> Case:
        sizes = self._sizes
        query, key = (self._normal(sizes.num_tokens, heads, sizes.head_dim) for heads in (sizes.num_heads, sizes.num_kv_heads))
        angles = torch.outer(torch.arange(sizes.num_tokens, device=self._device), 0.9 ** torch.arange(sizes.head_dim // 2, device=self._device))
        positions, before = torch.arange(sizes.num_tokens, dtype=torch.int32, device=self._device), query.double()
        turns = [0]

        def run() -> None:
            rotate(query, key, angles.cos(), angles.sin(), positions)
            turns[0] += 1

        def error() -> float:
            half, turned = sizes.head_dim // 2, (angles.double() * turns[0])[:, None]
            first, second = before[..., :half], before[..., half:]
            return _error(query, torch.cat([first * turned.cos() - second * turned.sin(), second * turned.cos() + first * turned.sin()], dim=-1))

        return Case("rotate", run, rotate_cost(sizes.num_tokens, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim // 2, 2), error)

    def _gates(self) -> Case:
        gate_up = self._normal(self._sizes.num_tokens, 2 * self._sizes.inner_size)
        out = torch.empty(self._sizes.num_tokens, self._sizes.inner_size, dtype=torch.bfloat16, device=self._device)

        def error() -> float:
            gate, up = gate_up.double().chunk(2, dim=-1)
            return _error(out, torch.nn.functional.silu(gate) * up)

        return Case("gated", lambda: gated(gate_up, Activation.SILU, out), gated_cost(self._sizes.num_tokens, self._sizes.inner_size, 2), error)

    def _pool(self, num_tokens: int) -> torch.Tensor:
        return self._normal(-(-num_tokens // _BLOCK_SIZE) + 1, 2, 2, _BLOCK_SIZE, self._sizes.num_kv_heads, self._sizes.head_dim)

    def _writing(self) -> Case:
        sizes, pool = self._sizes, self._pool(self._sizes.num_tokens)
        key, value = (self._normal(sizes.num_tokens, sizes.num_kv_heads, sizes.head_dim) for _ in range(2))
        slots = torch.randperm(sizes.num_tokens, generator=self._random, device=self._device)

        def error() -> float:
            return max(_error(pool[slots // _BLOCK_SIZE, _LAYER, which, slots % _BLOCK_SIZE], rows.double()) for which, rows in ((0, key), (1, value)))

        return Case(
            "write_kv", lambda: write_kv(key, value, pool, _LAYER, slots), write_kv_cost(sizes.num_tokens, sizes.num_kv_heads, sizes.head_dim, 2), error
        )

    def _gathering(self) -> Case:
        pool = self._pool(self._sizes.num_tokens)
        ids = torch.randperm(len(pool), generator=self._random, device=self._device)
        out = torch.empty_like(pool)
        return Case("gather_blocks", lambda: gather_blocks(pool, ids, out), copy_blocks_cost(len(ids), pool[0].nbytes), lambda: _error(out, pool[ids].double()))

    def _sequences(self, count: int, length: int, query_len: int) -> tuple[torch.Tensor, torch.Tensor, DeviceBatch]:
        """Queries of the last tokens of sequences, the pool that holds all their keys and values, and where they lie."""
        sizes, blocks = self._sizes, -(-length // _BLOCK_SIZE)
        pool = self._pool(count * blocks * _BLOCK_SIZE)
        tables = torch.randperm(count * blocks, generator=self._random, device=self._device).int().view(count, blocks)
        starts = torch.arange(count + 1, dtype=torch.int32, device=self._device) * query_len
        firsts = torch.full((count,), length - query_len, dtype=torch.int32, device=self._device)
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        query = self._normal(count * query_len, sizes.num_heads, sizes.head_dim)
        return query, pool, DeviceBatch(starts, firsts, tables, none.int(), none, query_len, length)

    def _attention_error(self, query: torch.Tensor, pool: torch.Tensor, batch: DeviceBatch, out: torch.Tensor, scores: Scores) -> float:
        """Of the last sequence's first few tokens."""
        count = min(batch.max_query_len, 8)
        first, start = int(batch.first_positions[-1]), len(query) - batch.max_query_len
        places = torch.arange(first + count)
        blocks = batch.tables[-1].cpu().long()[places // _BLOCK_SIZE].to(pool.device)
        keys, values = (pool[blocks, _LAYER, which, (places % _BLOCK_SIZE).to(pool.device)].double().cpu() for which in (0, 1))
        rows = slice(start, start + count)
        return _error(out[rows].cpu(), attend_causal(query[rows].double().cpu(), keys, values, first, scores))

    def _prefill(self) -> Case:
        sizes, scores = self._sizes, Scores(self._sizes.head_dim**-0.5)
        query, pool, batch = self._sequences(1, sizes.num_tokens, sizes.num_tokens // 2)
        out = torch.empty_like(query)
        chunks = [(sizes.num_tokens - batch.max_query_len, batch.max_query_len)]
        cost = paged_prefill_cost(chunks, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, 2)
        return Case(
            "paged_prefill",
            lambda: paged_prefill(query, pool, _LAYER, batch, scores, out),
            cost,
            lambda: self._attention_error(query, pool, batch, out, scores),
        )

    def _decode(self) -> Case:
        sizes, scores = self._sizes, Scores(self._sizes.head_dim**-0.5)
        query, pool, batch = self._sequences(sizes.batch, sizes.context, 1)
        out, workspace = torch.empty_like(query), workspace_of(sizes.batch, sizes.num_heads, sizes.head_dim, sizes.context, self._device)
        cost = paged_decode_cost([sizes.context] * sizes.batch, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, 2)
        return Case(
            "paged_decode",
            lambda: paged_decode(query, pool, _LAYER, batch, scores, out, workspace),
            cost,
            lambda: self._attention_error(query, pool, batch, out, scores),
        )

    def _product(self, num_rows: int) -> Case:
        x, weight = self._normal(num_rows, self._sizes.hidden_size), self._normal(self._sizes.inner_size, self._sizes.hidden_size)
        out = torch.empty(num_rows, self._sizes.inner_size, dtype=torch.bfloat16, device=self._device)
        cost = matmul_cost(num_rows, self._sizes.inner_size, self._sizes.hidden_size, 2, 2)
        return Case(f"matmul of {num_rows}", lambda: matmul(x, weight, None, out), cost, lambda: _error(out, x.double() @ weight.double().T))


def broken(rows: list[dict[str, float | str]]) -> list[str]:
    """Kernels that are farther from float64 than rounding explains."""
    return [f"{row['kernel']} ({row['error']})" for row in rows if not float(row["error"]) <= _MAX_ERROR]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())
