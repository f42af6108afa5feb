"""The waterfall's rows, order and bars."""

from __future__ import annotations

import io

from rich.console import Console

from cli.waterfall import duration_text, waterfall
from telemetry.receiver import ReceivedEvent, ReceivedSpan


def _span(
    name: str, service: str, ids: tuple[str, str], times_ms: tuple[int, int], *, kind: str = "INTERNAL", first_token_ms: int | None = None
) -> ReceivedSpan:
    """`ids` are the span's and its parent's."""
    events = () if first_token_ms is None else (ReceivedEvent("first_token", first_token_ms * 1_000_000, {}),)
    start_ns, end_ns = (time * 1_000_000 for time in times_ms)
    return ReceivedSpan(name, service, service, kind, "t", *ids, start_ns, end_ns, {}, events, "UNSET", "")


_SPANS = [
    _span("decode", "decode", ("d", "c"), (50, 100), first_token_ms=75),
    _span("tandem.v1.DecodeService/Generate", "decode", ("c", "b"), (25, 100), kind="SERVER"),
    _span("tandem.v1.GatewayService/Generate", "gateway", ("a", "client"), (0, 100), kind="SERVER"),
    _span("tandem.v1.DecodeService/Generate", "gateway", ("b", "a"), (20, 100), kind="CLIENT"),
    _span("queue", "gateway", ("q", "a"), (1, 1)),
]


def _lines(spans: list[ReceivedSpan], width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(waterfall(spans, width))
    return out.getvalue().splitlines()


def test_rows_are_parents_before_children_and_siblings_by_start() -> None:
    rows = _lines(_SPANS)
    assert [row.strip().split(" ")[0] for row in rows[:5]] == ["Gateway/Generate", "queue", "→", "Decode/Generate", "decode"]


def test_bars_are_aligned_on_time() -> None:
    rows = _lines(_SPANS)
    left, right = rows[0].index("█"), rows[0].rindex("█")
    width = right - left + 1
    assert abs(rows[3].index("█") - left - width * 0.25) <= 1
    assert abs(rows[4].index("◆") - left - width * 0.75) <= 1


def test_span_without_length_still_leaves_a_mark() -> None:
    assert set(_lines(_SPANS)[1]) & set("▏▎▍▌▋▊▉█")


def test_every_row_fits_the_terminal() -> None:
    assert all(len(line) <= 80 for line in _lines(_SPANS, 80))


def test_durations_keep_three_digits() -> None:
    texts = [duration_text(seconds) for seconds in (123.4, 1.2345, 0.3456, 0.04567, 0.000789, 0.0)]
    assert texts == ["123 s", "1.23 s", "346 ms", "45.7 ms", "789 µs", "0.00 µs"]
