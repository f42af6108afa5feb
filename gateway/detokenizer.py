"""Token ids to text, one token at a time, never half a character."""

from __future__ import annotations

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_UNDECIDED_TOKENS = 16
"""A character is at most four bytes, so at most four tokens: a longer run that still ends in U+FFFD is not a character on its way."""


class Detokenizer:
    """Turns one completion's tokens into text.

    All pieces joined, with `flush()`, are `decode(all ids)`. One exception has no other answer: with byte-fallback vocabularies `decode` of a run of bytes
    turns characters that were complete, and sent, back into U+FFFD when the run ends in the middle of the next one; here sent text stays.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        """Ids from the start of the piece sent last: decoding needs its left neighbour (spaces, byte runs)."""
        self._num_sent = 0
        """Leading ids of the window whose text is sent."""

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that became certain; empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._unsent()
        undecided = text.endswith(_REPLACEMENT) and len(self._window) - self._num_sent < _MAX_UNDECIDED_TOKENS
        if undecided or not text:
            self._trim_silent_tokens(text)
            return ""
        self._window = self._window[self._num_sent :]
        self._num_sent = len(self._window)
        return text

    def flush(self) -> str:
        """Returns what was held back; an incomplete character becomes U+FFFD."""
        text = self._unsent()
        self._num_sent = len(self._window)
        return text

    def _unsent(self) -> str:
        whole, sent = self._decode(self._window), self._decode(self._window[: self._num_sent])
        return whole[len(sent) :] if whole.startswith(sent) else self._decode(self._window[self._num_sent :])

    def _trim_silent_tokens(self, text: str) -> None:
        """Keeps the window short in a long run of tokens without text (skipped special tokens)."""
        if not text and len(self._window) - self._num_sent > 4 * _MAX_UNDECIDED_TOKENS:
            del self._window[self._num_sent :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens) if token_ids else ""
