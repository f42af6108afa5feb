"""Tokenizer directories of three model families, trained on the spot: small vocabularies, the families' own pipelines and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.",
    "Hello, world! How are you today? I'm fine, thanks; don't you think it's 12,345 o'clock?\n\n    def f(x):\n        return x + 1\n",
    "user system assistant You are a helpful assistant. <think> end start im_end |> <| [INST] header eot_id",
    "Zürich, naïve café, 東京タワー, привет мир, 🎉🎊 emoji",
]

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{%- for message in messages %}{%- set content = message.content %}{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
_GPT4_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_family(directory: Path, family: str) -> Path:
    """Writes a model directory without weights; `family` is smollm2, qwen3, llama3 or llama2."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer, config = {"smollm2": _smollm2, "qwen3": _qwen3, "llama3": _llama3, "llama2": _llama2}[family]()
    tokenizer.save(str(directory / "tokenizer.json"))
    template = config.pop("chat_template")
    if family == "llama2":
        config["chat_template"] = template
    else:
        (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config})
    )
    eos = tokenizer.token_to_id(config["eos_token"])
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512, "eos_token_id": eos}
    (directory / "config.json").write_text(json.dumps(sizes))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos]}))
    return directory


def _byte_level(split: str | None, special_first: list[str], normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [pre_tokenizers.Split(Regex(split), "isolated"), byte_level] if split is not None else [pre_tokenizers.Digits(individual_digits=True), byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special_first, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _smollm2() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level(None, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"])
    return tokenizer, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "chat_template": CHATML}


def _qwen3() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level(_GPT4_SPLIT, [], normalizers.NFC())
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>")])
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "add_bos_token": False, "chat_template": QWEN3}


def _llama3() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level(_GPT4_SPLIT, [])
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    around = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), around])
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3}


def _llama2() -> tuple[Tokenizer, dict[str, Any]]:
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator([CORPUS[0], CORPUS[1], CORPUS[2]], trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    learned = [token for token in model["vocab"] if token not in special]
    vocab = {token: index for index, token in enumerate([*special, *fallback, *learned])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config: Mapping[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False}
    return tokenizer, {**config, "chat_template": LLAMA2}
