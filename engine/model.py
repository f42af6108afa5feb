"""Loading a model: a local directory, safetensors only, nobody's code but transformers' own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from engine.attention import ATTENTION_NAME, register_paged_attention
from engine.config import Dtype
from engine.errors import EngineError
from engine.fingerprint import model_fingerprint

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")

_SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies depend on nothing but the config: "dynamic" and "longrope" change them with the longest sequence in a batch."""

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(EngineError):
    """A model directory that cannot be served; the text names the file or tensor."""


class UnsupportedModelError(ModelError):
    """A model of a kind that this engine does not run; the text names what it is."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights in memory, and what attention and the pool need to know of them."""

    name: str
    module: Any
    """The causal language model of transformers; `.model` gives hidden states, `.lm_head` logits."""
    dtype_name: str
    fingerprint: str
    vocab_size: int
    max_position_embeddings: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: frozenset[int]

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations and KV."""
        return _TORCH_DTYPES[self.dtype_name]


def load_model(directory: Path, dtype: Dtype = "auto", device: str = "cpu") -> LoadedModel:
    """Loads weights straight into `dtype` on `device`; where the checkpoint's type is kept on CPU, they stay mapped from its files.

    So the files must not be rewritten in place while a process serves them: replace them by a rename. Raises UnsupportedModelError before anything large
    is read, ModelError for files that are missing, torn or do not fit the architecture.
    """
    raw = _read_json(directory, "config.json")
    _refuse_unsupported(raw)
    if not any(directory.glob("*.safetensors")):
        raise ModelError(f"{directory}: no *.safetensors file")
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    dtype_name = _dtype_name(raw) if dtype == "auto" else dtype
    module = _load_module(directory, config, _TORCH_DTYPES[dtype_name], device)
    return LoadedModel(
        name=directory.resolve().name,
        module=module,
        dtype_name=dtype_name,
        fingerprint=model_fingerprint(directory),
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eos_token_ids=_eos_token_ids(directory, raw),
    )


def _load_module(directory: Path, config: PretrainedConfig, dtype: torch.dtype, device: str) -> Any:
    register_paged_attention()
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            device_map=None if device == "cpu" else device,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"{directory}: {error}") from error
    module, report = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := report.get(kind):
            shown = sorted(name if isinstance(name, str) else f"{name[0]} {tuple(name[1])} for {tuple(name[2])}" for name in names)
            raise ModelError(f"{directory}: {len(names)} {kind.split('_')[0]} tensors: {', '.join(shown[:8])}")
    return module.eval().requires_grad_(False)


def _refuse_unsupported(config: dict[str, Any]) -> None:
    architecture = (config.get("architectures") or ["an unnamed architecture"])[0]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    sliding = config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ())
    reasons = {
        "encoder-decoder models": config.get("is_encoder_decoder"),
        "multimodal models": any(key in config for key in ("vision_config", "audio_config", "text_config")),
        "multi-head latent attention": "kv_lora_rank" in config,
        "sliding window attention": sliding or (config.get("sliding_window") and "use_sliding_window" not in config),
        "quantized checkpoints": "quantization_config" in config,
        f"rope type {rope_type!r}": rope_type not in _SUPPORTED_ROPE_TYPES,
        "this architecture": architecture not in SUPPORTED_ARCHITECTURES,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"{architecture}: {reason} not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _dtype_name(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _TORCH_DTYPES:
        raise UnsupportedModelError(f"dtype {name!r} of config.json is not supported; one of {', '.join(_TORCH_DTYPES)}")
    return name


def _eos_token_ids(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    generation = _read_json(directory, "generation_config.json") if (directory / "generation_config.json").is_file() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value
