"""Server-sent events in whatever pieces they come."""

from __future__ import annotations

import pytest

from bench.sse import SseError, SseParser

_STREAM = (
    b": ping\n\n"
    b'data: {"a": 1}\n\n'
    b'event: error\r\nid: 7\r\ndata: {"b": "\xc3\xa4"}\r\n\r\n'
    b"data:no space\n\n"
    b"data: two\ndata: lines\n\n"
    b"retry: 10\n\n"
    b"data: [DONE]\n\n"
)
_EVENTS = [b'{"a": 1}', b'{"b": "\xc3\xa4"}', b"no space", b"two\nlines", b"[DONE]"]


def parsed(*pieces: bytes) -> list[bytes]:
    parser = SseParser()
    found = [data for piece in pieces for data in parser.feed(piece)]
    assert parser.is_between_events
    return found


def test_a_stream_in_one_piece_gives_its_events() -> None:
    assert parsed(_STREAM) == _EVENTS


@pytest.mark.parametrize("position", range(len(_STREAM) + 1))
def test_a_split_at_any_byte_changes_nothing(position: int) -> None:
    assert parsed(_STREAM[:position], _STREAM[position:]) == _EVENTS


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_small_pieces_change_nothing(size: int) -> None:
    assert parsed(*(_STREAM[at : at + size] for at in range(0, len(_STREAM), size))) == _EVENTS


def test_an_event_comes_with_the_piece_that_ends_it_and_not_later() -> None:
    parser = SseParser()
    assert list(parser.feed(b"data: 1\n")) == []
    assert not parser.is_between_events
    assert list(parser.feed(b"\ndata: 2")) == [b"1"]


def test_an_event_without_end_is_refused_before_it_fills_the_memory() -> None:
    parser = SseParser()
    for _ in range(16):
        assert list(parser.feed(b"x" * (1 << 20))) == []
    with pytest.raises(SseError, match="larger than 16 MiB"):
        list(parser.feed(b"x"))
