"""Runs of byte tokens, in vocabularies that spell rare characters byte by byte."""

from __future__ import annotations

import codecs
from enum import Enum

MAX_HELD_BYTES = 256
"""A run that is still open after so many bytes is sent up to here: a language that the vocabulary does not know at all must stream too."""


class RunState(Enum):
    """What is known of a run behind the byte that came last."""

    OPEN = "open"
    """Its text is decided by what follows."""
    LONG = "long"
    """As open, at the end of a character, and as long as may be held back."""
    BROKEN = "broken"
    """It is no UTF-8."""


class ByteRun:
    """One run. Decoders take it as a whole: one that is no UTF-8 becomes U+FFFD for each byte, those of characters that were complete too."""

    def __init__(self) -> None:
        self.num_held = 0
        """Bytes whose text has not been taken."""
        self.num_last_bytes = 1
        """Bytes of the last complete character."""
        self._broken = False
        self._num_begun = 0
        """Bytes of the character on its way."""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def push(self, byte: int) -> RunState:
        """Takes the next byte."""
        self.num_held += 1
        try:
            self._num_begun += 1
            if not self._broken and self._decoder.decode(bytes((byte,))):
                self.num_last_bytes, self._num_begun = self._num_begun, 0
        except UnicodeDecodeError:
            self._broken = True
        if self._broken:
            return RunState.BROKEN
        return RunState.LONG if self.num_held >= MAX_HELD_BYTES and not self._num_begun else RunState.OPEN

    @property
    def is_broken(self) -> bool:
        """No UTF-8 if it ends here."""
        return self._broken or self._num_begun > 0

    def take(self) -> int:
        """Bytes held until now, which are held no more."""
        taken, self.num_held = self.num_held, 0
        return taken
