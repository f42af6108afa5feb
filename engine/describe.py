"""Reads transformers' module of a dense model into a Decoder: the one place that knows how their modules are built."""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

from engine.activations import SteadyGELU, SteadyGELUTanh, SteadySiLU
from engine.attention import Scores
from engine.decoder import Activation, Decoder, Layer, Linear, Norm, Rope

_ACTIVATIONS: dict[type, Activation] = {
    torch.nn.SiLU: Activation.SILU,
    SiLUActivation: Activation.SILU,
    SteadySiLU: Activation.SILU,
    GELUActivation: Activation.GELU,
    SteadyGELU: Activation.GELU,
    GELUTanh: Activation.GELU_TANH,
    NewGELUActivation: Activation.GELU_TANH,
    SteadyGELUTanh: Activation.GELU_TANH,
}
_GEMMA = "Gemma3ForCausalLM"
_WINDOW_OF_CONFIG = ("MistralForCausalLM", "Phi3ForCausalLM")
"""Their attention passes on the config's own window; others keep one for each layer, or have none."""
_DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", _GEMMA)


class NotDescribedError(Exception):
    """A model that is no dense decoder of a known form; the text says why."""


def describe_decoder(module: Any) -> Decoder:
    """What a causal language model of transformers computes; weights stay the module's own memory. Raises NotDescribedError."""
    name = type(module).__name__
    if name not in _DENSE:
        raise NotDescribedError(f"{name} is no dense decoder that is known here")
    model, config = module.model, module.config
    ropes, rope_of_type = _ropes(model.rotary_emb, name)
    layers = tuple(_layer(layer, name, config, rope_of_type) for layer in model.layers)
    kinds = {type(getattr(layer.mlp, "act_fn", None) or layer.mlp.activation_fn) for layer in model.layers}
    if len(kinds) != 1 or not kinds <= set(_ACTIVATIONS):
        raise NotDescribedError(f"activations {', '.join(sorted(kind.__name__ for kind in kinds))} are not known here")
    attention = model.layers[0].self_attn
    return Decoder(
        embedding=model.embed_tokens.weight,
        embedding_scale=float(model.embed_tokens.embed_scale.to(model.embed_tokens.weight.dtype)) if name == _GEMMA else 1.0,
        layers=layers,
        ropes=ropes,
        final_norm=_norm(model.norm, name),
        head=module.lm_head.weight,
        activation=_ACTIVATIONS[kinds.pop()],
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
    )


def _layer(layer: Any, name: str, config: Any, rope_of_type: dict[str, int]) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = (getattr(attention, norm, None) for norm in ("q_norm", "k_norm"))
    after = name == _GEMMA
    mlp_norm = layer.pre_feedforward_layernorm if after else layer.post_attention_layernorm
    gate_up = _linear(mlp.gate_up_proj) if hasattr(mlp, "gate_up_proj") else _linear(mlp.gate_proj, mlp.up_proj)
    if gate_up.bias is not None:
        raise NotDescribedError("its gates have a bias")
    return Layer(
        input_norm=_norm(layer.input_layernorm, name),
        qkv=_linear(attention.qkv_proj) if hasattr(attention, "qkv_proj") else _linear(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=None if q_norm is None else _norm(q_norm, name),
        k_norm=None if k_norm is None else _norm(k_norm, name),
        rope=rope_of_type[attention.layer_type] if after else 0,
        scores=_scores(attention, name, config),
        output=_linear(attention.o_proj),
        after_attention=_norm(layer.post_attention_layernorm, name) if after else None,
        mlp_norm=_norm(mlp_norm, name),
        gate_up=gate_up,
        down=_linear(mlp.down_proj),
        after_mlp=_norm(layer.post_feedforward_layernorm, name) if after else None,
    )


def _scores(attention: Any, name: str, config: Any) -> Scores:
    window = config.sliding_window if name in _WINDOW_OF_CONFIG else getattr(attention, "sliding_window", None)
    return Scores(float(attention.scaling), window, getattr(attention, "attn_logit_softcapping", None))


def _norm(norm: Any, name: str) -> Norm:
    weight = norm.weight.detach().float()
    return Norm(weight + 1.0, norm.eps) if name == _GEMMA else Norm(weight, norm.variance_epsilon)


def _linear(*parts: Any) -> Linear:
    """Parts along the outputs, the module's own parameters."""
    biases = [part.bias for part in parts]
    bias = None
    if any(each is not None for each in biases):
        bias = torch.cat(
            [part.weight.new_zeros(len(part.weight)).float() if each is None else each.detach().float() for part, each in zip(parts, biases, strict=True)]
        )
    return Linear(tuple(part.weight for part in parts), bias)


def _ropes(rotary: Any, name: str) -> tuple[tuple[Rope, ...], dict[str, int]]:
    """All of them, and which one layers of a type have."""
    if name != _GEMMA:
        return (Rope(rotary.inv_freq.float(), float(rotary.attention_scaling)),), {}
    types = list(rotary.layer_types)
    ropes = tuple(Rope(getattr(rotary, f"{each}_inv_freq").float(), float(getattr(rotary, f"{each}_attention_scaling"))) for each in types)
    return ropes, {each: index for index, each in enumerate(types)}
