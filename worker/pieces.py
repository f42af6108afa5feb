"""Lists that are too long for one message, in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

_T = TypeVar("_T")

MAX_ENTRIES_PER_MESSAGE: Final = 256
"""Tokens or log probabilities. With 20 alternatives each some 100 KB: far below the largest message that anybody takes."""


def pieces(entries: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """All entries in order, at most MAX_ENTRIES_PER_MESSAGE at a time; nothing for none."""
    for first in range(0, len(entries), MAX_ENTRIES_PER_MESSAGE):
        yield entries[first : first + MAX_ENTRIES_PER_MESSAGE]
