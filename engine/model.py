"""Loading a model: a local directory, safetensors only, nobody's code but transformers' own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from engine.activations import steady_activations
from engine.architectures import ModelError, UnsupportedModelError, refuse_unsupported
from engine.attention import ATTENTION_NAME, AttentionBackend, register_paged_attention
from engine.config import Dtype
from engine.experts import EXPERTS_NAME, register_steady_experts
from engine.fingerprint import model_fingerprint
from engine.rows import num_padded, padded
from engine.strict_sums import ask_for_strict_sums

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights in memory, how to compute with them, and what attention and the pool need to know of them."""

    name: str
    module: Any
    """The causal language model of transformers."""
    dtype_name: str
    fingerprint: str
    vocab_size: int
    max_position_embeddings: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: frozenset[int]
    final_softcap: float | None
    """Logits go through `softcap * tanh(logits / softcap)`."""
    steady: bool
    """With attention that is batch-invariant, and strict sums or one thread, a token's hidden state and logits have the same bits in every batch."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations and KV."""
        return _TORCH_DTYPES[self.dtype_name]

    def hidden_states(self, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], attention: AttentionBackend) -> torch.Tensor:
        """Runs the decoder over one packed batch, [tokens] ids and positions, for which `attention.begin` was called; [tokens, hidden size].

        Padding rows are token 0 at position 0; attention gives them zeros and writes no KV for them.
        """
        missing = num_padded(len(token_ids), self.dtype) - len(token_ids)
        ids, places = (torch.from_numpy(np.pad(array, (0, missing)))[None] for array in (token_ids, positions))
        output = self.module.model(input_ids=ids, position_ids=places, use_cache=False, paged_attention=attention)
        hidden: torch.Tensor = output.last_hidden_state[0, : len(token_ids)]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits [rows, vocabulary] of at least one row of hidden states."""
        logits: torch.Tensor = self.module.lm_head(padded(hidden))[: len(hidden)].float()
        return logits if self.final_softcap is None else torch.tanh(logits / self.final_softcap) * self.final_softcap


def load_model(directory: Path, dtype: Dtype = "auto", device: str = "cpu") -> LoadedModel:
    """Loads weights straight into `dtype` on `device`; where the checkpoint's type is kept on CPU, they stay mapped from its files.

    So the files must not be rewritten in place while a process serves them: replace them by a rename. Raises UnsupportedModelError before anything large
    is read, ModelError for files that are missing, torn or do not fit the architecture.
    """
    ask_for_strict_sums()
    raw = _read_json(directory, "config.json")
    refuse_unsupported(raw)
    if not any(directory.glob("*.safetensors")):
        raise ModelError(f"{directory}: no *.safetensors file")
    config = _read_config(directory)
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
        final_softcap=getattr(config, "final_logit_softcapping", None),
        steady=dtype_name == "float32" and steady_activations(module),
    )


def _read_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ModelError(f"{directory / 'config.json'}: {error}") from error


def _load_module(directory: Path, config: PretrainedConfig, dtype: torch.dtype, device: str) -> Any:
    register_paged_attention()
    register_steady_experts()
    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            device_map=None if device == "cpu" else device,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=EXPERTS_NAME,
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
