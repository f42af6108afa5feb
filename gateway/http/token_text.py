"""What one token is by itself, for log probabilities: its bytes, and a text for them."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from gateway.vocabulary import Vocabulary

_SPACE = "\u2581"
"""How vocabularies of SentencePiece write a space."""


class TokenText:
    """Of one vocabulary. Memory is bounded by the vocabulary's size."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._byte_level = "ByteLevel" in _decoders(vocabulary)
        self._added = vocabulary.tokenizer.get_added_tokens_decoder()
        self.bytes_of = lru_cache(maxsize=None)(self._bytes_of)
        """A token's own bytes; none for an id that the vocabulary does not have."""

    def text_of(self, token_id: int) -> str:
        """What a reader sees: bytes that are no whole characters become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def name_of(self, token_id: int) -> str:
        """The text where that says it all, else the bytes as OpenAI's completions write them: two tokens have two names."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes_of(self, token_id: int) -> bytes:
        byte = self._vocabulary.byte_tokens.get(token_id)
        if byte is not None:
            return bytes([byte])
        piece = self._vocabulary.tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode()
        if self._byte_level:
            return bytes(_BYTES[char] for char in piece) if all(char in _BYTES for char in piece) else piece.encode()
        return piece.replace(_SPACE, " ").encode()


def _decoders(vocabulary: Vocabulary) -> set[str]:
    decoder = vocabulary.tokenizer.decoder
    told: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {}
    return {str(step.get("type")) for step in (told, *told.get("decoders", ()))}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: a printable character for each byte, those that are printable standing for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()
