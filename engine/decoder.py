"""What a dense decoder computes, apart from the module that transformers made of it: its weights, fused where they are used together, and their order.

Whoever computes it without transformers' modules, natively on CPU or by kernels and graphs on CUDA, reads this and nothing else; so heads and weights are
reached in one place. Order of a layer, for tokens x of the residual stream:

    h = norm(x, input_norm)
    q, k, v = split(h @ qkv.T + bias); q, k = norm(q, q_norm), norm(k, k_norm) where there are any; q, k = rope(q), rope(k)
    a = attention(q, k, v) @ output.T + bias;   x += norm(a, after_attention) where there is one, else a
    h = norm(x, mlp_norm)
    g, u = split(h @ gate_up.T)
    m = (act(g) * u) @ down.T;                  x += norm(m, after_mlp) where there is one, else m

Logits are norm(x, final_norm) @ head.T, capped where the model has a cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from engine.attention import Scores


class Activation(Enum):
    """What the gate goes through."""

    SILU = "silu"
    GELU = "gelu"
    """By the error function."""
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last axis."""

    weight: torch.Tensor
    """What is multiplied by, whole: for Gemma one plus the checkpoint's. float32."""
    epsilon: float


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias."""

    weights: tuple[torch.Tensor, ...]
    """Of shape [outputs, inputs] each, one after the other along the outputs; the module's own memory."""
    bias: torch.Tensor | None = None
    """[outputs of all], float32."""

    @property
    def num_outputs(self) -> int:
        """Of all weights together."""
        return sum(len(weight) for weight in self.weights)

    @property
    def num_inputs(self) -> int:
        """Of each."""
        return self.weights[0].shape[1]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation of the first 2 * len(frequencies) elements of a head by position: element i with element i + len(frequencies)."""

    frequencies: torch.Tensor
    """Radians a position, float32."""
    scale: float
    """Of cosine and sine."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; see the module's text for the order."""

    input_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    rope: int
    """Index in `Decoder.ropes`."""
    scores: Scores
    output: Linear
    after_attention: Norm | None
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    after_mlp: Norm | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model."""

    embedding: torch.Tensor
    """[vocabulary, hidden size], the module's own memory."""
    embedding_scale: float
    """Of a token's row; rounded to the weights' type, as the model was trained."""
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    final_norm: Norm
    head: torch.Tensor
    """[vocabulary, hidden size]; the embedding itself where they are tied."""
    activation: Activation
    num_heads: int
    num_kv_heads: int
    head_dim: int
