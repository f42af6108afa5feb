"""What the gateway knows of the model it serves, read from a directory without weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate, ChatTemplateError, read_chat_template
from gateway.model_defaults import ModelDefaults
from gateway.tokenizer import TextTokenizer, apply_config, special_tokens_of

GenerationConfig = Literal["auto", "none"]
"""Whether sampling defaults come from the model's generation_config.json; its end-of-sequence tokens always do."""


class ModelDirectoryError(Exception):
    """The model directory cannot be served; the text is for the operator."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model: its public name, its limits and its tokenizer."""

    name: str
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    vocab_size: int
    """Rows of the model's embedding; token ids are below it."""
    eos_token_ids: frozenset[int]
    tokenizer: TextTokenizer
    longest_token_chars: int = 1024
    """No token stands for more characters than this; longer prompts are refused before they are tokenized."""
    defaults: ModelDefaults = field(default_factory=ModelDefaults)

    @classmethod
    def load(
        cls, directory: Path, *, name: str = "", max_model_len: int | None = None, num_threads: int = 2, generation_config: GenerationConfig = "auto"
    ) -> ServedModel:
        """Reads tokenizer.json, tokenizer_config.json, config.json and generation_config.json. Raises ModelDirectoryError."""
        try:
            return _load(directory, name, max_model_len, num_threads, generation_config)
        except (ChatTemplateError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelDirectoryError(f"{directory}: {type(error).__name__}: {error}") from error


def _load(directory: Path, name: str, asked_len: int | None, num_threads: int, generation_config: GenerationConfig) -> ServedModel:
    config = _read_json(directory / "config.json", needed=True)
    config = {**config, **config.get("text_config", {})}
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    backend = _read_tokenizer(directory / "tokenizer.json")
    apply_config(backend, tokenizer_config)
    source = read_chat_template(directory, tokenizer_config)
    template = ChatTemplate(source, special_tokens_of(tokenizer_config)) if source is not None else None
    generation = _read_json(directory / "generation_config.json")
    eos_of = generation.get("eos_token_id", config.get("eos_token_id"))
    return ServedModel(
        name=name or directory.name,
        max_model_len=_context_length(directory, config, asked_len),
        vocab_size=int(config.get("vocab_size", backend.get_vocab_size(with_added_tokens=True))),
        eos_token_ids=frozenset(map(int, [eos_of] if isinstance(eos_of, int) else eos_of or ())),
        tokenizer=TextTokenizer(backend, template, num_threads=num_threads),
        longest_token_chars=max(map(len, backend.get_vocab(with_added_tokens=True)), default=1),
        defaults=ModelDefaults.of(generation) if generation_config == "auto" else ModelDefaults(),
    )


def _context_length(directory: Path, config: dict[str, Any], asked: int | None) -> int:
    own = config.get("max_position_embeddings")
    if asked is None and own is None:
        raise ModelDirectoryError(f"{directory / 'config.json'} has no max_position_embeddings: give --max-model-len")
    if asked is not None and own is not None and asked > own:
        raise ModelDirectoryError(f"--max-model-len {asked} is above the model's own {own} (max_position_embeddings)")
    length = own if asked is None else asked
    return int(length or 0)


def _read_json(file: Path, *, needed: bool = False) -> dict[str, Any]:
    if not file.is_file():
        if needed:
            raise ModelDirectoryError(f"{file} is missing")
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelDirectoryError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{file} is no JSON object")
    return content


def _read_tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise ModelDirectoryError(f"{file} is missing")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelDirectoryError(f"{file} cannot be read: {error}") from error
