"""A byte-level BPE tokenizer out of a GGUF file's header, as tokenizer.json, tokenizer_config.json and chat_template.jinja.

Built here since transformers' own reading of GGUF drops which pre-tokenizer the model was trained with: it splits "  2024" in another way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from cli.errors import UserError

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types

_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

Header = Mapping[str, Any]
"""The GGUF's key-value pairs, read into Python values."""


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _pre_tokenizer(header: Header) -> pre_tokenizers.PreTokenizer:
    name = header.get("tokenizer.ggml.pre")
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name == "qwen2":
        return _split_by(_QWEN2_SPLIT)
    if name in ("llama-bpe", "llama3"):
        return _split_by(_LLAMA3_SPLIT)
    raise UserError(f"tokenizer.ggml.pre is {name!r}; known are smollm, qwen2, llama-bpe, llama3")


def build_tokenizer(header: Header) -> Tokenizer:
    """Raises UserError for a tokenizer that is not byte-level BPE, or whose pre-tokenizer is not known."""
    model = header.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UserError(f"tokenizer.ggml.model is {model!r}; only byte-level BPE (gpt2) can be imported")
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in header["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(header)
    tokenizer.decoder = decoders.ByteLevel()
    if header["tokenizer.ggml.pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds: list[int] = header["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED])
    tokenizer.post_processor = _post_processor(header)
    return tokenizer


def _post_processor(header: Header) -> processors.PostProcessor:
    if not header.get("tokenizer.ggml.add_bos_token", False):
        return processors.ByteLevel(trim_offsets=False)
    bos_id: int = header["tokenizer.ggml.bos_token_id"]
    bos: str = header["tokenizer.ggml.tokens"][bos_id]
    return processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)])


def _config(header: Header, max_model_len: int) -> dict[str, Any]:
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_model_len,
        "add_bos_token": bool(header.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    for field, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if (token_id := header.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[field] = tokens[token_id]
    return config


def write_tokenizer(header: Header, directory: Path, *, max_model_len: int) -> None:
    """Writes the tokenizer's files. A GGUF without a chat template gives none: such a model takes text and token ids only."""
    build_tokenizer(header).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(_config(header, max_model_len), indent=2, ensure_ascii=False) + "\n")
    if template := header.get("tokenizer.chat_template"):
        (directory / "chat_template.jinja").write_text(template)
