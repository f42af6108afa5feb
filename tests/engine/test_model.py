"""What a model directory must be, and how errors name what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checks.tiny_models import write_tiny_model
from engine.architectures import ModelError, UnsupportedModelError
from engine.config import ConfigError, EngineConfig
from engine.fingerprint import model_fingerprint
from engine.model import load_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama that the test may break."""
    return write_tiny_model(tmp_path / "model")


def _edit_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    config.update(changes)
    (model / "config.json").write_text(json.dumps(config))


def _edit_tensors(model: Path, add: dict[str, torch.Tensor], remove: str = "") -> None:
    tensors = load_file(model / "model.safetensors")
    tensors.pop(remove, None)
    save_file({**tensors, **add}, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel: this architecture not supported; supported: LlamaForCausalLM, Qwen2"),
        ({"architectures": None}, "an unnamed architecture"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "T5ForConditionalGeneration: encoder-decoder"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "multi-head latent attention"),
        ({"architectures": ["KimiK2ForCausalLM"]}, "multi-head latent attention"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "multimodal"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}}, "Gemma3ForConditionalGeneration: multimodal"),
        ({"architectures": ["MambaForCausalLM"], "state_size": 16}, "state-space layers"),
        ({"architectures": ["FalconMambaForCausalLM"]}, "state-space layers"),
        ({"architectures": ["Qwen3NextForCausalLM"], "linear_num_key_heads": 4}, "linear attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear attention"),
        ({"architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 8192}, "chunked attention"),
        ({"architectures": ["GptOssForCausalLM"]}, "attention sinks"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "bidirectional attention"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "warped_attention"]}, "layers of type warped_attention"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]}, "layers of type full_attention, sliding_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "rope type 'dynamic'"),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1] * 8, "long_factor": [2] * 8}},
            "rope type 'longrope'",
        ),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
    ],
)
def test_models_of_other_kinds_are_refused_by_name(model: Path, changes: dict[str, Any], match: str) -> None:
    _edit_config(model, **changes)
    with pytest.raises(UnsupportedModelError, match=match):
        load_model(model)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_every_name_of_phi_3s_longrope_is_refused(tmp_path: Path, name: str) -> None:
    model = write_tiny_model(tmp_path, "phi3")
    _edit_config(model, rope_parameters=None, rope_scaling={"type": name, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4})
    with pytest.raises(UnsupportedModelError, match=f"Phi3ForCausalLM: rope type '{name}'"):
        load_model(model)


def test_one_layer_types_rope_is_looked_at_too(tmp_path: Path) -> None:
    rope = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}}
    model = write_tiny_model(tmp_path, "gemma3_text")
    _edit_config(model, rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="Gemma3ForCausalLM: rope type 'dynamic'"):
        load_model(model)


def test_a_config_that_transformers_refuses_is_named(model: Path) -> None:
    _edit_config(model, hidden_size="wide")
    with pytest.raises(ModelError, match=r"(?s)config\.json: .*hidden_size"):
        load_model(model)


def test_missing_unexpected_and_misshapen_tensors_are_named(model: Path) -> None:
    whole = (model / "model.safetensors").read_bytes()
    _edit_tensors(model, {}, remove="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"1 missing tensors: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(model)
    (model / "model.safetensors").write_bytes(whole)
    _edit_tensors(model, {"model.layers.0.self_attn.extra.weight": torch.zeros(3)})
    with pytest.raises(ModelError, match=r"1 unexpected tensors: model\.layers\.0\.self_attn\.extra\.weight"):
        load_model(model)
    (model / "model.safetensors").write_bytes(whole)
    _edit_tensors(model, {"model.norm.weight": torch.zeros(5)})
    with pytest.raises(ModelError, match=r"1 mismatched tensors: model\.norm\.weight \(5,\) for \(96,\)"):
        load_model(model)


def test_a_torn_or_missing_file_is_named(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=str(model)):
        load_model(model)
    weights.unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load_model(model)
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not JSON"):
        load_model(model)
    with pytest.raises(ModelError, match=r"absent/config\.json: no such file"):
        load_model(tmp_path / "absent")


def test_pickled_weights_are_never_read(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load_model(model)


def test_end_tokens_come_from_the_generation_config_first(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_model(model).eos_token_ids == {5, 7}
    (model / "generation_config.json").unlink()
    assert load_model(model).eos_token_ids == {2}
    _edit_config(model, eos_token_id=None)
    assert load_model(model).eos_token_ids == set()


def test_weights_have_the_asked_dtype_and_the_checkpoints_own_by_default(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in load_model(model).module.parameters()} == {torch.bfloat16}
    loaded = load_model(model, "float32")
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.float32}
    assert loaded.module.lm_head.weight is loaded.module.model.embed_tokens.weight, "tied weights are one tensor"
    inverse_frequencies = loaded.module.model.rotary_emb.inv_freq
    assert torch.equal(inverse_frequencies, 1.0 / 10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16))


def test_the_fingerprint_is_of_content_not_of_place(model: Path, tmp_path: Path) -> None:
    first = model_fingerprint(model)
    moved = model.rename(tmp_path / "moved")
    _edit_config(moved, transformers_version="0.0", dtype="bfloat16", _name_or_path="elsewhere")
    assert model_fingerprint(moved) == first
    _edit_config(moved, rms_norm_eps=1e-3)
    changed = model_fingerprint(moved)
    assert changed != first
    weights = bytearray((moved / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (moved / "model.safetensors").write_bytes(weights)
    assert model_fingerprint(moved) not in (first, changed)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"attention_backend": "flash"}, "attention_backend"),
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 5, "kv_cache_memory": 5}, "num_blocks"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8, "max_prefill_tokens_per_step": 8}, "max_num_seqs"),
        ({"max_prefill_tokens_per_step": 4096}, "max_prefill_tokens_per_step"),
        ({"reserve_output_tokens": 0}, "reserve_output_tokens"),
        ({"max_stall_s": float("nan")}, "max_stall_s"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_a_bad_value_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: ") as raised:
        EngineConfig(Path("model"), **changes)
    assert raised.value.field == field
