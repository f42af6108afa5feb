"""One trace as a waterfall: a row for each span, bars aligned on time, a colour for each service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from telemetry.receiver import ReceivedSpan

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MAX_NAME_WIDTH, _DURATION_WIDTH, _MIN_BAR_WIDTH = 46, 8, 20


def waterfall(spans: Sequence[ReceivedSpan], width: int) -> Group:
    """Renders the spans of one trace for a terminal of `width` columns. Spans whose parent is missing stand as roots."""
    colours = {service: _COLOURS[i % len(_COLOURS)] for i, service in enumerate(dict.fromkeys(span.service for span in _by_start(spans)))}
    start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    rows = [(f"{'  ' * depth}{_title(span)}", span) for depth, span in _tree(spans)]
    name_width = min(_MAX_NAME_WIDTH, max(len(title) for title, _ in rows))
    bar_width = max(_MIN_BAR_WIDTH, width - name_width - _DURATION_WIDTH - 4)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True, width=name_width, overflow="ellipsis")
    table.add_column(no_wrap=True, width=bar_width)
    table.add_column(no_wrap=True, justify="right", width=_DURATION_WIDTH)
    for title, span in rows:
        colour = "bold red" if span.status == "ERROR" else colours[span.service]
        bar = _bar(span.start_ns - start_ns, span.end_ns - start_ns, end_ns - start_ns, bar_width)
        table.add_row(Text(title, colour), Text(_with_events(bar, span, start_ns, end_ns), colour), duration_text(span.duration_s))
    services = Text("  ").join(Text(f"■ {service}", colour) for service, colour in colours.items())
    legend = Text.assemble(services, ("   ◆ first token", "dim"), (f"   {duration_text((end_ns - start_ns) / 1e9)} from left to right", "dim"))
    return Group(table, legend)


def duration_text(seconds: float) -> str:
    """Three digits and a unit: 1.23 s, 45.6 ms, 789 µs."""
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    value = seconds * factor
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"


def _by_start(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def _tree(spans: Sequence[ReceivedSpan]) -> Iterator[tuple[int, ReceivedSpan]]:
    """Depth and span, parents before children, siblings by start."""
    known = {span.span_id for span in spans}
    children: dict[str, list[ReceivedSpan]] = {}
    for span in _by_start(spans):
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    pending = [(0, span) for span in reversed(children.get("", []))]
    while pending:
        depth, span = pending.pop()
        yield depth, span
        pending.extend((depth + 1, child) for child in reversed(children.get(span.span_id, [])))


def _title(span: ReceivedSpan) -> str:
    if "/" not in span.name:
        return span.name
    service, method = span.name.rsplit("/", 1)
    return f"{'→ ' if span.kind == 'CLIENT' else ''}{service.rsplit('.', 1)[-1].removesuffix('Service')}/{method}"


def _bar(start_ns: int, end_ns: int, total_ns: int, width: int) -> str:
    """A bar in eighths of a column; never without a mark, however short."""
    scale = width * 8 / max(total_ns, 1)
    start, end = round(start_ns * scale), round(end_ns * scale)
    column, offset = divmod(min(start, width * 8 - 1), 8)
    whole, part = divmod(max(end - column * 8, 1), 8)
    bar = "█" * whole + (_EIGHTHS[part] if part else "")
    if offset >= 4 and whole:  # there is no right-hand eighth: a half block is as fine as a left edge gets
        bar = "▐" + bar[1:]
    return (" " * column + bar)[:width].ljust(width)


def _with_events(bar: str, span: ReceivedSpan, start_ns: int, end_ns: int) -> str:
    cells = list(bar)
    for event in span.events:
        if event.name == "first_token":
            cells[min(len(cells) - 1, max(0, (event.at_ns - start_ns) * len(cells) // max(end_ns - start_ns, 1)))] = "◆"
    return "".join(cells)
