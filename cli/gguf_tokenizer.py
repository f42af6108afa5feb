"""A BPE tokenizer, byte-level or SentencePiece's, out of a GGUF file's header, as tokenizer.json, tokenizer_config.json and chat_template.jinja.

Built here since transformers' own reading of GGUF drops which pre-tokenizer a byte-level one was trained with: it splits "  2024" in another way.
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
    """Raises UserError for a kind of tokenizer, or a pre-tokenizer, that is not known."""
    model = header.get("tokenizer.ggml.model")
    if model not in _BUILDERS:
        raise UserError(f"tokenizer.ggml.model is {model!r}; known are gpt2 (byte-level BPE) and llama (SentencePiece)")
    tokenizer = _BUILDERS[model](header)
    tokens = list(_vocabulary(header))
    kinds: list[int] = header["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED and token.strip("▁")]  # runs of spaces are merges' business
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in whole])
    return tokenizer


def _byte_level(header: Header) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in header["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab=_vocabulary(header), merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(header)
    tokenizer.decoder = decoders.ByteLevel()
    if header["tokenizer.ggml.pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = _post_processor(header, processors.ByteLevel(trim_offsets=False))
    return tokenizer


def _gemma(header: Header) -> Tokenizer:
    """SentencePiece's BPE as Gemma has it: spaces become "▁", what the vocabulary lacks becomes its bytes, no space is put in front."""
    if not str(header.get("general.architecture")).startswith("gemma"):
        raise UserError(f"{header.get('general.architecture')}: of the tokenizers of kind llama (SentencePiece), only Gemma's can be imported")
    from transformers.tokenization_utils_base import generate_merges

    vocabulary = _vocabulary(header)
    # A header lists no merges. They are recovered from the vocabulary, whose order is theirs (its scores are not).
    merges = generate_merges(vocabulary, {token: -index for token, index in vocabulary.items()})
    unknown = header["tokenizer.ggml.tokens"][header["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    if processor := _post_processor(header, None):
        tokenizer.post_processor = processor
    return tokenizer


_BUILDERS = {"gpt2": _byte_level, "llama": _gemma}


def _vocabulary(header: Header) -> dict[str, int]:
    tokens: list[str] = header["tokenizer.ggml.tokens"]
    if header["tokenizer.ggml.model"] == "llama":  # runs of spaces are stored as such, where the model's own vocabulary has them as "▁"
        tokens = ["▁" * len(token) if token.isspace() and " " in token else token for token in tokens]
    return {token: index for index, token in enumerate(tokens)}


def _post_processor(header: Header, without_bos: processors.PostProcessor | None) -> processors.PostProcessor | None:
    if not header.get("tokenizer.ggml.add_bos_token", False):
        return without_bos
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
