"""Several samples of one prompt on one terminal: each whole, one below the other."""

from __future__ import annotations

from collections.abc import Callable

from tandem_client import Piece


class SampleWriter:
    """Writes the first sample as it comes; what comes of a later one waits until all before it have ended. A line break follows each."""

    def __init__(self, n: int, write: Callable[[str], None]) -> None:
        """With more than one sample a line in front of each says which it is."""
        self._n = n
        self._write = write
        self._waiting = [""] * n
        self._ended = [False] * n
        self._current = 0
        self._began = False
        """The current sample is on the screen."""

    def add(self, piece: Piece) -> None:
        """Takes the next piece of any sample."""
        self._waiting[piece.index] += piece.text
        self._ended[piece.index] |= piece.finish is not None
        while self._current < self._n and (self._waiting[self._current] or self._ended[self._current]):
            self._write_current()
            if not self._ended[self._current]:
                return
            self._end_current()

    def break_off(self) -> None:
        """No more will come: shows what there is of each."""
        while self._current < self._n:
            if self._waiting[self._current]:
                self._write_current()
            self._end_current()

    def _write_current(self) -> None:
        if not self._began and self._n > 1:
            self._write(f"--- {self._current + 1} of {self._n} ---\n")
        self._began = True
        text, self._waiting[self._current] = self._waiting[self._current], ""
        if text:
            self._write(text)

    def _end_current(self) -> None:
        if self._began:
            self._write("\n")
        self._began = False
        self._current += 1
