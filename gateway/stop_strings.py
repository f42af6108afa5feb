"""Stop strings in a stream of text pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checked:
    """What can go out now, and the stop string that ended the text, if one did."""

    text: str
    matched: str | None = None


class StopStrings:
    """Watches one completion's text.

    The match that is complete first wins, of those that end together the longest: the answer does not depend on how the text is cut into pieces.
    A match that ends in exempt text is none; one that begins there and ends behind it counts.
    Only text that could still become a match is held back; with `include_in_output` nothing is, since the match goes out too.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        """`stop` holds no empty string."""
        self._stop = tuple(dict.fromkeys(stop))
        self._include = include_in_output
        self._undecided = ""
        """The longest end of the text so far that begins a stop string; already sent when matches are included."""

    def push(self, piece: str, *, num_exempt: int = 0) -> Checked:
        """Takes the next piece, whose first `num_exempt` characters are exempt. After a match the text is complete and nothing more may be pushed."""
        if not piece or not self._stop:
            return Checked(piece)
        num_sent = len(self._undecided) if self._include else 0
        text = self._undecided + piece
        match = self._first_match(piece, num_exempt)
        if match is not None:
            start, stop = match
            self._undecided = ""
            return Checked(text[num_sent : start + len(stop) if self._include else start], stop)
        self._undecided = text[len(text) - self._num_undecided(text) :]
        return Checked(text[num_sent:] if self._include else text[: len(text) - len(self._undecided)])

    def would_match(self, piece: str, *, num_exempt: int = 0) -> bool:
        """Whether `push` would find a match."""
        return bool(piece) and self._first_match(piece, num_exempt) is not None

    def flush(self) -> str:
        """Returns what was held back: no more text will come."""
        held, self._undecided = self._undecided, ""
        return "" if self._include else held

    def _first_match(self, piece: str, num_exempt: int) -> tuple[int, str] | None:
        """Start, counted from that of the undecided text, of the match that ends first behind what is exempt; the undecided text is."""
        text, exempt = self._undecided + piece, len(self._undecided) + num_exempt
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop, max(0, exempt - len(stop) + 1))) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _num_undecided(self, text: str) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
