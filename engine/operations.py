"""What a decoder's step is made of, on tensors of one device and in place; one implementation in plain torch, the reference, for all devices."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention import Scores
from engine.decoder import Activation, Norm
from engine.device_batch import DeviceBatch


class Operations(Protocol):
    """Writes results into tensors it is given, waits for nothing and reads no tensor on the host, so that a CUDA graph can hold all of it.

    Sums are float32. Rows of tensors may lie apart, elements of a row or of a head may not.
    """

    attention_backend: str
    """"triton" or "torch"."""
    batch_invariant: bool
    """A row's bits depend neither on the other rows nor on their number, nor on how a prompt was cut into chunks."""

    def norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, out: torch.Tensor) -> None:
        """out = norm(x), or residual += x and out = norm(residual); all [tokens, size], `out` may be `x`."""
        ...

    def head_norm(self, heads: torch.Tensor, norm: Norm) -> None:
        """In place; [tokens, heads, head_dim]."""
        ...

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
        """In place; query and key [tokens, heads, head_dim], cos and sin float32 [positions, half], of which `positions` chooses a token's row."""
        ...

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """out [tokens, outputs] = x [tokens, inputs] @ weight.T + bias; `out` has x's type or is float32."""
        ...

    def gated(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """out [tokens, size] = activation of the first half of gate_up [tokens, 2 * size], times the second."""
        ...

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, batch: DeviceBatch) -> None:
        """Puts [tokens, num_kv_heads, head_dim] into a layer of the pool."""
        ...

    def attend(self, query: torch.Tensor, pool: torch.Tensor, layer: int, batch: DeviceBatch, scores: Scores, out: torch.Tensor) -> None:
        """Attention of query [tokens, num_heads, head_dim] to what its sequence has in the pool up to its own position; out alike. Padding: anything."""
        ...


class TorchOperations:
    """Plain torch, for every device: the reference, and what runs where nothing better is there."""

    attention_backend = "torch"
    batch_invariant = False

    def norm(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, out: torch.Tensor) -> None:
        """See Operations."""
        out.copy_(_normed(x if residual is None else residual.add_(x), norm))

    def head_norm(self, heads: torch.Tensor, norm: Norm) -> None:
        """See Operations."""
        heads.copy_(_normed(heads, norm))

    def rotate(self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
        """See Operations."""
        half = cos.shape[1]
        cosine, sine = (table.index_select(0, positions)[:, None] for table in (cos, sin))
        for heads in (query, key):
            first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
            turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
            heads[..., : 2 * half] = turned

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """See Operations."""
        torch_linear(x, weight, bias, out)

    def gated(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """See Operations."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        out.copy_(_activated(gate, activation) * up)

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, pool: torch.Tensor, layer: int, batch: DeviceBatch) -> None:
        """See Operations."""
        block_size = pool.shape[3]
        places = (batch.slots // block_size, batch.slots % block_size)
        for which, rows in ((0, key), (1, value)):
            pool[:, layer, which].index_put_(places, rows)

    def attend(self, query: torch.Tensor, pool: torch.Tensor, layer: int, batch: DeviceBatch, scores: Scores, out: torch.Tensor) -> None:
        """See Operations. Gathers what it attends to, of all sequences at a time where each has one token, else of one after the other."""
        ends = batch.first_positions + batch.query_starts.diff()
        if batch.max_query_len == 1:
            keys, values = _gathered(pool, layer, batch.tables, batch.max_kv_len)
            out.copy_(_attended(query[:, None], keys, values, batch.first_positions, ends, scores)[:, 0])
            return
        num_tokens = len(query)
        padded = query.new_empty(num_tokens + 1, *query.shape[1:])
        offsets = torch.arange(batch.max_query_len, device=query.device)
        for chunk in range(batch.num_seqs):
            rows = batch.query_starts[chunk] + offsets
            keys, values = _gathered(pool, layer, batch.tables[chunk : chunk + 1], batch.max_kv_len)
            own = slice(chunk, chunk + 1)
            found = _attended(query[rows.clamp(max=num_tokens - 1)][None], keys, values, batch.first_positions[own], ends[own], scores)[0]
            padded.index_copy_(0, torch.where(rows < batch.query_starts[chunk + 1], rows, num_tokens), found.to(padded.dtype))
        out.copy_(padded[:num_tokens])


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """`Operations.linear` by torch's own products, which choose their order of sums by the number of rows."""
    if out.dtype == x.dtype:
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias.to(x.dtype), x, weight.t(), out=out)
    elif x.is_cuda:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
        if bias is not None:
            out.add_(bias)
    else:  # torch on CPU has no product with another type of result
        torch_linear(x.to(out.dtype), weight.to(out.dtype), bias, out)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon) * norm.weight


def _activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation is Activation.SILU:
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation is Activation.GELU_TANH else "none")


def _gathered(pool: torch.Tensor, layer: int, tables: torch.Tensor, max_kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first positions of some sequences, each float32 [num_seqs, positions, num_kv_heads, head_dim]."""
    num_blocks = -(-max_kv_len // pool.shape[3])
    found = pool[:, layer][tables[:, :num_blocks]].float()  # [num_seqs, num_blocks, 2, block_size, num_kv_heads, head_dim]
    return found[:, :, 0].flatten(1, 2), found[:, :, 1].flatten(1, 2)


def _attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_positions: torch.Tensor, ends: torch.Tensor, scores: Scores) -> torch.Tensor:
    """query [num_seqs, tokens, num_heads, head_dim], those of a sequence from its first position on; what lies at its end and behind is not read."""
    num_tokens, num_positions = query.shape[1], keys.shape[1]
    positions = torch.arange(num_positions, device=query.device)
    own = first_positions[:, None] + torch.arange(num_tokens, device=query.device)
    distance = own[:, :, None] - positions
    visible = (distance >= 0) & (distance < (scores.window or num_positions))
    grouped = query.float().view(*query.shape[:2], keys.shape[2], -1, query.shape[3])
    weights = torch.einsum("stkgd,spkd->skgtp", grouped * scores.scaling, keys)
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    weights = torch.softmax(weights.masked_fill(~visible[:, None, None], -torch.inf), dim=-1)
    read = visible & (own < ends[:, None])[:, :, None]
    values = values.masked_fill(~read.any(1)[:, :, None, None], 0.0)  # what no token sees may be anything, NaN too
    return torch.einsum("skgtp,spkd->stkgd", weights, values).flatten(2, 3)
