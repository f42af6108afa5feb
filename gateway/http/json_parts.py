"""How many parts a body's JSON has, counted before it is parsed: the parser holds the interpreter's lock, and makes a hundred bytes of two."""

from __future__ import annotations

import re
from typing import Final

from rpc.errors import invalid_argument

MAX_PARTS: Final = 1 << 16
"""Strings, lists and objects of one body; the largest that is served, a conversation of 1024 messages of ten parts each, has fewer."""
_WINDOW_BYTES: Final = 1 << 16
"""`re` holds the lock for one of them at a time, which is well under a millisecond."""
_IN_A_STRING: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_QUOTE: Final = ord('"')


def check_parts(raw: bytes, most: int = MAX_PARTS) -> None:
    """Raises StatusError for a body of more strings, lists and objects than any request needs. What is no JSON is the parser's to refuse."""
    num_parts, inside, at = 0, False, 0
    while at < len(raw):
        end = min(at + _WINDOW_BYTES, len(raw))
        if inside:
            match = _IN_A_STRING.match(raw, at, end)
            assert match is not None  # nothing is a match too
            stop = match.end()
            if stop == end:
                at = end
            elif raw[stop] == _QUOTE:
                inside, at = False, stop + 1
            else:
                at = stop + 2  # a backslash at the window's end, and what it escapes
        else:
            quote = raw.find(b'"', at, end)
            stop = end if quote < 0 else quote
            num_parts += raw.count(b"[", at, stop) + raw.count(b"{", at, stop) + (quote >= 0)
            inside, at = quote >= 0, stop + (quote >= 0)
        if num_parts > most:
            raise invalid_argument("body", f"has more than {most} strings, lists and objects")
