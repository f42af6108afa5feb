"""A decoder's step as few operations on static memory: what CUDA graphs hold, and on every device a reference for it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from engine.decoder import Decoder, Layer, Linear, Norm, Rope
from engine.device_batch import DeviceBatch
from engine.operations import Operations


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What a step of so many tokens writes, one row a token; smaller steps take the first rows, so that their graphs share one memory."""

    residual: torch.Tensor
    """float32, so that the sum over layers is rounded to the weights' type only where it is read."""
    wanted: torch.Tensor
    """Rows of it."""
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    product: torch.Tensor
    gate_up: torch.Tensor
    gated: torch.Tensor

    def first(self, num_tokens: int) -> _Scratch:
        """That of a smaller step."""
        return _Scratch(*(getattr(self, name)[:num_tokens] for name in self.__slots__))


class FusedForward:
    """A model over one pool. One thread calls it, on one stream; what it returns is its own memory, and holds until the next step.

    It allocates nothing that outlives a call and never waits for the device.
    """

    name = "fused"

    def __init__(
        self,
        decoder: Decoder,
        pool: torch.Tensor,
        operations: Operations,
        *,
        max_tokens: int,
        max_rows: int,
        max_positions: int,
        softcap: float | None = None,
    ) -> None:
        """`decoder` is fused (engine.fused_weights), on the pool's device and of its dtype.

        A step has at most `max_tokens` tokens, padding included, at positions below `max_positions`; logits are asked for at most `max_rows` rows at a time and
        go through `softcap * tanh(logits / softcap)` where it is given.
        """
        self._decoder = decoder
        self._pool = pool
        self._operations = operations
        self._softcap = softcap
        self.attention_backend = operations.attention_backend
        self.batch_invariant = operations.batch_invariant
        self._tables = [_rope_tables(rope, max_positions) for rope in decoder.ropes]
        self._scratch = _scratch(decoder, max_tokens)
        self._hidden = torch.empty_like(self._scratch.normed)
        self._logits = self._hidden.new_empty(max_rows, len(decoder.head), dtype=torch.float32)

    @property
    def num_static_bytes(self) -> int:
        """Memory of steps and tables, which is held from the start."""
        scratch = [getattr(self._scratch, name) for name in self._scratch.__slots__]
        return sum(tensor.nbytes for tensor in [*scratch, self._hidden, self._logits, *(table for pair in self._tables for table in pair)])

    def hidden_states(self, token_ids: torch.Tensor, batch: DeviceBatch, rows: torch.Tensor) -> torch.Tensor:
        """Writes keys and values of all tokens into the pool; hidden states of tokens `rows`, final norm included, in the weights' type: [rows, hidden size].

        token_ids and rows are int32 or int64, on the device. Padding is any token of the vocabulary.
        """
        scratch = self._scratch.first(batch.num_tokens)
        decoder = self._decoder
        torch.index_select(decoder.embedding, 0, token_ids, out=scratch.product)
        torch.mul(scratch.product, decoder.embedding_scale, out=scratch.residual)
        self._operations.norm(scratch.residual, None, decoder.layers[0].input_norm, scratch.normed)
        for index, (layer, following) in enumerate(pairwise((*decoder.layers, None))):
            assert layer is not None
            self._layer(index, layer, batch, scratch)
            if following is not None:
                self._add(scratch.product, layer.after_mlp, scratch.residual, following.input_norm, scratch.normed)
        return self._wanted(decoder.layers[-1], rows, scratch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 [rows, vocabulary] of hidden states [rows, hidden size]."""
        logits = self._logits[: len(hidden)]
        self._operations.linear(hidden, self._decoder.head, None, logits)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)

    def _layer(self, index: int, layer: Layer, batch: DeviceBatch, scratch: _Scratch) -> None:
        """From the normed tokens to what the layer's second half adds to the residual stream, in `product`."""
        self._linear(scratch.normed, layer.qkv, scratch.qkv)
        query, key, value = self._heads(scratch.qkv)
        for heads, norm in ((query, layer.q_norm), (key, layer.k_norm)):
            if norm is not None:
                self._operations.head_norm(heads, norm)
        self._operations.rotate(query, key, *self._tables[layer.rope], batch.positions)
        self._operations.write_kv(key, value, self._pool, index, batch)
        self._operations.attend(query, self._pool, index, batch, layer.scores, scratch.attended.view(query.shape))
        self._linear(scratch.attended, layer.output, scratch.product)
        self._add(scratch.product, layer.after_attention, scratch.residual, layer.mlp_norm, scratch.normed)
        self._linear(scratch.normed, layer.gate_up, scratch.gate_up)
        self._operations.gated(scratch.gate_up, self._decoder.activation, scratch.gated)
        self._linear(scratch.gated, layer.down, scratch.product)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views [tokens, heads, head_dim] of queries, keys and values."""
        decoder = self._decoder
        counts = (decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads)
        parts = torch.split(qkv, [count * decoder.head_dim for count in counts], dim=1)
        query, key, value = (part.view(len(qkv), count, decoder.head_dim) for part, count in zip(parts, counts, strict=True))
        return query, key, value

    def _wanted(self, last: Layer, rows: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
        """The end of the last layer and the final norm, of some rows only."""
        product, residual = scratch.normed[: len(rows)], scratch.wanted[: len(rows)]
        torch.index_select(scratch.product, 0, rows, out=product)
        torch.index_select(scratch.residual, 0, rows, out=residual)
        hidden = self._hidden[: len(rows)]
        self._add(product, last.after_mlp, residual, self._decoder.final_norm, hidden)
        return hidden

    def _add(self, product: torch.Tensor, after: Norm | None, residual: torch.Tensor, norm: Norm, out: torch.Tensor) -> None:
        """residual += product, normed first where there is a norm for it, and out = norm(residual)."""
        if after is not None:
            self._operations.norm(product, None, after, product)
        self._operations.norm(product, residual, norm, out)

    def _linear(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        (weight,) = linear.weights
        self._operations.linear(x, weight, linear.bias, out)


def _rope_tables(rope: Rope, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, float32 [max_positions, half]."""
    angles = torch.outer(torch.arange(max_positions, device=rope.frequencies.device, dtype=torch.float32), rope.frequencies)
    return angles.cos() * rope.scale, angles.sin() * rope.scale


def _scratch(decoder: Decoder, max_tokens: int) -> _Scratch:
    def rows(size: int, dtype: torch.dtype = decoder.embedding.dtype) -> torch.Tensor:
        return torch.empty(max_tokens, size, dtype=dtype, device=decoder.embedding.device)

    hidden_size, layer = decoder.embedding.shape[1], decoder.layers[0]
    return _Scratch(
        residual=rows(hidden_size, torch.float32),
        wanted=rows(hidden_size, torch.float32),
        normed=rows(hidden_size),
        qkv=rows(layer.qkv.num_outputs),
        attended=rows(layer.output.num_inputs),
        product=rows(hidden_size),
        gate_up=rows(layer.gate_up.num_outputs),
        gated=rows(layer.down.num_inputs),
    )
