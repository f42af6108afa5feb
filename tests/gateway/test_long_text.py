from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from gateway.long_text import replace

PATTERN = re.compile("aab|ab|b|aabbb")
LONGEST_FIRST = re.compile("aabbb|aab|ab|b")


@given(text=st.text("abc", max_size=60), window=st.integers(1, 12), longest=st.integers(5, 9))
def test_windows_change_nothing(text: str, window: int, longest: int) -> None:
    for pattern in (PATTERN, LONGEST_FIRST):
        whole = pattern.sub(lambda match: f"<{match[0]}>", text)
        assert replace(pattern, lambda match: f"<{match[0]}>", text, longest=longest, window=window) == whole


def test_a_text_without_a_match_is_the_same_text() -> None:
    assert replace(PATTERN, lambda _: "", "c" * 1000, longest=5, window=7) == "c" * 1000
    assert replace(re.compile("(?!)"), lambda _: "", "abc", longest=2) == "abc"
