"""Which models this engine runs, and the names of those that it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import EngineError

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
)

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies depend on nothing but the config: "dynamic" and "longrope" change them with the longest sequence in a batch."""

_LAYER_TYPES = ("full_attention", "sliding_attention")
_ONE_KIND_OF_LAYER = ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM")
"""transformers ignores `layer_types` in these."""

_FAMILIES_BY_REASON = {
    "attention sinks": ("GptOss",),
    "chunked attention": ("Llama4",),
    "state-space layers": ("Mamba", "FalconMamba", "Jamba", "Bamba", "Zamba", "NemotronH", "FalconH1", "GraniteMoeHybrid", "PlamoForCausalLM"),
    "linear attention": ("Qwen3Next", "Qwen3_5", "MiniMax", "Rwkv", "RecurrentGemma", "KimiLinear"),
    "multi-head latent attention": ("DeepseekV2", "DeepseekV3", "KimiK2"),
}
_MULTIMODAL_KEYS = ("vision_config", "audio_config", "text_config", "vision_tower", "mm_tokens_per_image")
_STATE_SPACE_KEYS = ("ssm_cfg", "mamba_d_state", "mamba_d_conv", "ssm_state_size", "state_size")
_LINEAR_ATTENTION_KEYS = ("linear_num_key_heads", "linear_key_head_dim", "lightning_nope")


class ModelError(EngineError):
    """A model directory that cannot be served; the text names the file or tensor."""


class UnsupportedModelError(ModelError):
    """A model of a kind that this engine does not run; the text names what it is."""


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Looks at config.json as it lies there, before anything is loaded. Raises UnsupportedModelError."""
    architecture = str((config.get("architectures") or ["an unnamed architecture"])[0])
    for reason in _reasons(architecture, config):
        raise UnsupportedModelError(f"{architecture}: {reason} not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _reasons(architecture: str, config: Mapping[str, Any]) -> Iterator[str]:
    layer_types = set(config.get("layer_types") or ())
    if config.get("is_encoder_decoder"):
        yield "encoder-decoder models"
    if any(config.get(key) is not None for key in _MULTIMODAL_KEYS):
        yield "multimodal models"
    if config.get("kv_lora_rank") is not None:
        yield "multi-head latent attention"
    if config.get("quantization_config") is not None:
        yield "quantized checkpoints"
    if config.get("attention_chunk_size") is not None or "chunked_attention" in layer_types:
        yield "chunked attention"
    if any(key in config for key in _STATE_SPACE_KEYS) or "mamba" in layer_types:
        yield "state-space layers"
    if any(key in config for key in _LINEAR_ATTENTION_KEYS) or "linear_attention" in layer_types:
        yield "linear attention"
    for reason, families in _FAMILIES_BY_REASON.items():
        if architecture.startswith(families):
            yield reason
    if architecture not in SUPPORTED_ARCHITECTURES:
        yield "this architecture"
    if config.get("use_bidirectional_attention"):
        yield "bidirectional attention"
    allowed = ("default",) if architecture == "Phi3ForCausalLM" else _ROPE_TYPES  # transformers takes all others of Phi-3 for longrope
    for rope_type in _rope_types(config):
        if rope_type not in allowed:
            yield f"rope type {rope_type!r}"
    if unknown := layer_types.difference(() if architecture in _ONE_KIND_OF_LAYER else _LAYER_TYPES):
        yield f"layers of type {', '.join(sorted(unknown))}"


def _rope_types(config: Mapping[str, Any]) -> list[str]:
    """One for the whole model, or one for each type of layer."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer_type = [value for value in given.values() if isinstance(value, Mapping)]
    return [str(rope.get("rope_type", rope.get("type", "default"))) for rope in by_layer_type or [given]]
