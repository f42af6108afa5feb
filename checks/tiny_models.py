"""Random checkpoints of every architecture, made on the spot: config.json, generation_config.json and model.safetensors, no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

VOCAB_SIZE = 320
EOS_TOKEN_ID = 2
WINDOW = 24
"""Of the families that have one: short enough that most prompts are longer."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 1000,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_BY_FAMILY: Mapping[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "head_dim": 16},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": False},
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 32,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 12.0,
        "tie_word_embeddings": False,  # tied, its scaled embeddings make every token its own successor
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5, "tie_word_embeddings": False},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "intermediate_size": 200, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "moe_intermediate_size": 72,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
FAMILIES = tuple(_BY_FAMILY)
"""transformers' names of the eight architectures that the engine runs."""


def write_tiny_model(
    directory: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 0.2, **overrides: Any
) -> Path:
    """Writes a checkpoint of one of `FAMILIES` into `directory` and returns it; the same arguments give the same bytes.

    `scale` is the weights' standard deviation; the default is wide enough that greedy output is not one token repeated. `overrides` go into config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fields = {**_COMMON, **_BY_FAMILY[family], **overrides}
    config = AutoConfig.for_model(family, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        centre = 0.0 if family == "gemma3_text" else 1.0  # its norms multiply by 1 + weight
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, scale) if parameter.dim() > 1 else parameter.uniform_(centre - 0.2, centre + 0.2)
    disable_progress_bar()
    model.save_pretrained(directory)
    stored = json.loads((directory / "config.json").read_text())
    stored.update(fields, model_type=family, dtype=str(dtype).removeprefix("torch."))
    (directory / "config.json").write_text(json.dumps(stored, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": fields["eos_token_id"], "bos_token_id": 1}))
    return directory
