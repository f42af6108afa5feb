"""Replacing in texts of megabytes without a stall: `re` holds the interpreter's lock for a whole text, so it gets one window of it at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

WINDOW_CHARS = 65_536
"""Some milliseconds of the slowest scan."""


def replace(pattern: re.Pattern[str], new: Callable[[re.Match[str]], str], text: str, *, longest: int, window: int = WINDOW_CHARS) -> str:
    """`pattern.sub(new, text)` for a pattern that looks at nothing outside its match, no match of which is longer than `longest` characters."""
    pieces: list[str] = []
    end = 0
    for match in _matches(pattern, text, longest, window):
        pieces += (text[end : match.start()], new(match))
        end = match.end()
    return "".join((*pieces, text[end:]))


def _matches(pattern: re.Pattern[str], text: str, longest: int, window: int) -> Iterator[re.Match[str]]:
    start = 0
    while start < len(text):
        end = start + window
        match = pattern.search(text, start, end + longest)
        if match is not None and match.start() < end:  # one behind it may be cut off: the next window sees it whole
            yield match
            start = match.end()
        else:
            start = end
