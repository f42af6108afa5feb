"""What detokenizing needs to know of a tokenizer, gathered once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Safe in any thread."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    """What skip_special_tokens leaves out."""
    byte_tokens: Mapping[int, int]
    """Ids of tokens that stand for one byte each, such as <0x0A>, to their byte; empty for vocabularies whose decoder knows none."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Reads the tokenizer's definition."""
        special = frozenset(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        return cls(tokenizer, special, _byte_tokens(tokenizer) if _has_byte_fallback(tokenizer) else {})


def _has_byte_fallback(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
    return any(step["type"] == "ByteFallback" for step in decoder.get("decoders", [decoder]) if "type" in step)


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    named = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return {token_id: byte for byte, token_id in named.items() if token_id is not None}
