"""Token ids to text, one token at a time, never half a character."""

from __future__ import annotations

from gateway.byte_run import ByteRun, RunState
from gateway.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"
_MAX_CONTEXT_TOKENS = 5
"""What has begun a character is in the last three tokens; the one in front of them decides on spaces."""


class Detokenizer:
    """Turns one completion's tokens into text.

    All pieces joined, with `flush()`, are `decode(all ids)`: what a later token could change is held back. That is the beginning of a character, or, where
    characters are spelt by byte tokens, a run of those. One exception: of a run of more than MAX_HELD_BYTES bytes the characters that were sent stay, even
    if it turns out to be no UTF-8, for which `decode` has nothing but U+FFFD.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []
        """The last ids, from one whose text is sent: decoding needs a left neighbour."""
        self._num_sent = 0
        """Characters of the window's text that are sent."""
        self._run: ByteRun | None = None

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that became certain."""
        if token_id in self._skipped or self._vocabulary.tokenizer.id_to_token(token_id) is None:
            return ""  # as in `decode`, they are not there: they do not even end a run of bytes
        byte = self._vocabulary.byte_tokens.get(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        broken = self._end_run()
        self._window.append(token_id)
        return broken + self._certain()

    def held(self) -> str:
        """Held text that is complete if the completion ends here; "" when none is, or a character has only begun."""
        return "" if self._run is None or self._run.is_broken else self._decode()[self._num_sent :]

    def flush(self) -> str:
        """Returns what was held back: no more tokens will come. What has begun a character becomes U+FFFD."""
        text = self._end_run() or self._decode()[self._num_sent :]
        self._window, self._num_sent = [], 0
        return text

    def _push_byte(self, token_id: int, byte: int) -> str:
        self._run = self._run or ByteRun()
        self._window.append(token_id)
        match self._run.push(byte):
            case RunState.BROKEN:
                return self._replaced(self._run)
            case RunState.LONG:
                self._run.take()
                text = self._decode()[self._num_sent :]
                self._keep(self._run.num_last_bytes)
                return text
            case _:
                return ""

    def _end_run(self) -> str:
        run, self._run = self._run, None
        return self._replaced(run) if run is not None and run.is_broken else ""

    def _replaced(self, run: ByteRun) -> str:
        self._keep(1)
        return _REPLACEMENT * run.take()

    def _certain(self) -> str:
        """Text but for a last U+FFFD, which may be the beginning of a character: never more than that, whatever its bytes are."""
        text = self._decode()
        num_held = int(text.endswith(_REPLACEMENT) and not self._vocabulary.byte_tokens)
        piece = text[self._num_sent : len(text) - num_held]
        self._num_sent += len(piece)
        if len(self._window) > 2 * _MAX_CONTEXT_TOKENS:
            self._keep(_MAX_CONTEXT_TOKENS, num_held)
        return piece

    def _keep(self, num_tokens: int, num_held: int = 0) -> None:
        """Cuts the window, whose text is sent but for `num_held` characters."""
        self._window = self._window[-num_tokens:]
        self._num_sent = len(self._decode()) - num_held

    def _decode(self) -> str:
        # Special tokens that are to be left out never come into the window.
        return self._vocabulary.tokenizer.decode(self._window, skip_special_tokens=False) if self._window else ""
