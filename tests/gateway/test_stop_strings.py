from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.stop_strings import StopStrings

LETTERS = st.text("ab", max_size=12)


def run(pieces: list[str], stop: list[str], include: bool) -> tuple[str, str | None, int]:
    """Text, the match, and how many pieces were taken."""
    watch = StopStrings(stop, include_in_output=include)
    sent = ""
    for taken, piece in enumerate(pieces, 1):
        checked = watch.push(piece)
        sent += checked.text
        if checked.matched is not None:
            return sent, checked.matched, taken
    return sent + watch.flush(), None, len(pieces)


def expected(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """The match that ends first, of those the longest."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=500)
@given(pieces=st.lists(LETTERS, max_size=8), stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), include=st.booleans())
def test_the_answer_is_that_of_the_whole_text_however_it_is_cut(pieces: list[str], stop: list[str], include: bool) -> None:
    text, matched, _ = run(pieces, stop, include)
    assert (text, matched) == expected("".join(pieces), stop, include)


@given(pieces=st.lists(LETTERS, max_size=8), stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_a_match_is_seen_with_the_piece_that_completes_it(pieces: list[str], stop: list[str]) -> None:
    _, matched, taken = run(pieces, stop, False)
    if matched is not None:
        assert not any(s in "".join(pieces[: taken - 1]) for s in stop)


@given(text=st.text("ab", max_size=20), stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_could_become_a_match_is_held_back(text: str, stop: list[str]) -> None:
    watch = StopStrings(stop, include_in_output=False)
    seen = sent = ""
    for letter in text:
        checked = watch.push(letter)
        seen, sent = seen + letter, sent + checked.text
        if checked.matched is not None:
            return
        held = seen[len(sent) :]
        assert sent + held == seen
        assert not held or any(s.startswith(held) and s != held for s in stop)


def test_nothing_is_held_back_when_matches_are_included() -> None:
    watch = StopStrings(["STOP"], include_in_output=True)
    assert [watch.push(piece).text for piece in ("a ST", "O", "P and more")] == ["a ST", "O", "P"]


def test_without_stop_strings_text_passes() -> None:
    assert run(["a", "", "b"], [], False) == ("ab", None, 3)


@settings(max_examples=300)
@given(
    pieces=st.lists(st.tuples(LETTERS, st.integers(0, 12)), max_size=8), stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), include=st.booleans()
)
def test_a_match_counts_only_where_it_ends_behind_exempt_text(pieces: list[tuple[str, int]], stop: list[str], include: bool) -> None:
    watch, sent, matched, whole, exempt_ends = StopStrings(stop, include_in_output=include), "", None, "", set[int]()
    for piece, num_exempt in pieces:
        exempt_ends |= set(range(len(whole) + 1, len(whole) + min(num_exempt, len(piece)) + 1))
        whole += piece
        assert matched is None
        foreseen = watch.would_match(piece, num_exempt=num_exempt)
        checked = watch.push(piece, num_exempt=num_exempt)
        assert foreseen == (checked.matched is not None)
        sent, matched = sent + checked.text, checked.matched
        if matched is not None:
            break
    sent += watch.flush() if matched is None else ""
    found = [(end, -len(s), s) for s in stop for end in range(1, len(whole) + 1) if end not in exempt_ends and whole[:end].endswith(s)]
    assert matched == (min(found)[2] if found else None)
    if found:
        end, length, _ = min(found)
        assert sent == whole[: end if include else end + length]
    else:
        assert sent == whole
