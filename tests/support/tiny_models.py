"""Random Llama and Qwen3 checkpoints made on the spot: config.json, generation_config.json and model.safetensors, no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 320
EOS_TOKEN_ID = 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 1000,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "tie_word_embeddings": True,
}
_BY_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": False},
}


def write_tiny_model(
    directory: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 0.2, **overrides: Any
) -> Path:
    """Writes a checkpoint of `family` ("llama" or "qwen3") into `directory` and returns it; the same arguments give the same bytes.

    `scale` is the weights' standard deviation; the default is wide enough that greedy output is not one token repeated. `overrides` go into config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fields = {**_COMMON, **_BY_FAMILY[family], **overrides}
    config = AutoConfig.for_model(family, **fields)
    config.architectures = fields["architectures"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, scale) if parameter.dim() > 1 else parameter.uniform_(0.8, 1.2)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if not (config.tie_word_embeddings and name == "lm_head.weight")}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads(config.to_json_string(use_diff=False))
    stored.update(fields, model_type=family, dtype=str(dtype).removeprefix("torch."))
    (directory / "config.json").write_text(json.dumps(stored, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": fields["eos_token_id"], "bos_token_id": 1}))
    return directory
