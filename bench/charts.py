"""Line charts as SVG text. Colours, also those of a dark page, are the page's: an element only says which series it belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from bench.percentiles import Floats

NUM_STYLES = 6
WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 12, 46
_MARK_ROW = 16
_INK = -1
_MIN_LABEL_GAP = 46
_DASHES = ("", "8 4", "2 3", "10 3 2 3", "5 2", "1 4")
_MARKER = 3.6


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a value lies, 0 at the low end and 1 at the high one."""

    low: float
    high: float
    log: bool = False

    def place(self, values: Floats) -> Floats:
        """Values at or below 0 lie at the low end of a logarithmic scale."""
        if self.log:
            placed: Floats = (np.log10(np.maximum(values, self.low)) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            placed = (values - self.low) / (self.high - self.low)
        return placed


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    scale: Scale
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Spot:
    """A single measurement, with its interval as a whisker; NaN: it has none."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    cross: bool = False
    """A cross, not a dot."""


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    x: Floats
    y: Floats
    """NaN breaks the line."""
    style: int = 0
    """Colour: that of a run, the same everywhere on a page; -1: the ink's."""
    dash: int | None = None
    """Of its own; None: its style's."""
    spots: tuple[Spot, ...] = ()
    """What it was drawn from."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A straight line across: at a limit, at the knee."""

    at: float
    label: str
    vertical: bool = True


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of x that is shaded."""

    low: float
    high: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    note: str
    """What one must know to read it, in a line."""
    alt: str
    """What it shows, for who does not see it."""
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    bands: tuple[Band, ...] = ()
    height: int = HEIGHT


def span_of(parts: Sequence[Floats]) -> tuple[float, float]:
    """Least and largest finite value; (0, 1) of none."""
    values = np.concatenate([np.ravel(part) for part in parts]) if parts else np.array([])
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)


def linear(label: str, high: float, text: Callable[[float], str], *, low: float = 0.0, num_ticks: int = 5, tight: bool = False) -> Axis:
    """Ticks at round numbers; from `low` to the tick at or above `high`, or to `high` itself when `tight`."""
    high = high if high > low else low + 1
    step = _round_step((high - low) / num_ticks)
    end = high if tight else math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    ticks = [first_tick * step for first_tick in range(first, math.floor(end / step + 1e-9) + 1)]
    return Axis(label, Scale(low, end), tuple((tick, text(tick)) for tick in ticks))


def logarithmic(label: str, low: float, high: float, text: Callable[[float], str]) -> Axis:
    """Ticks at 1, 2 and 5 of each decade, or at the decades alone when there are many."""
    low, high = (low, high) if high > low * 1.5 else (low / 1.25, low * 1.25)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if math.log10(high / low) <= 2.6 else (1,)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    return Axis(label, Scale(low, high, log=True), tuple((tick, text(tick)) for tick in ticks if low * 0.999 <= tick <= high * 1.001))


def fitting(label: str, low: float, high: float, text: Callable[[float], str], *, tight: bool = False) -> Axis:
    """Logarithmic where values lie decades apart, else linear from 0."""
    if low > 0 and high / low > 20:
        return logarithmic(label, low, high, text)
    return linear(label, high, text, tight=tight)


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= least * 0.999)


def svg(chart: Chart) -> str:
    """One <svg> element."""
    frame = _Frame(chart)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {chart.height}" role="img" aria-label="{escape(chart.alt)}">',
        f"<title>{escape(chart.title)}</title>",
        *frame.bands(),
        *frame.grid(),
        f'<svg x="{_LEFT}" y="{frame.top}" width="{frame.width}" height="{frame.height}" viewBox="0 0 {frame.width} {frame.height}">',
        *(part for line in reversed(chart.lines) for part in frame.line(line)),
        "</svg>",
        *frame.marks(),
        "</svg>",
    ]
    return "".join(parts)


def legend(chart: Chart) -> str:
    """A list that wraps as text does. Always there, so that charts side by side stand level; empty when nothing needs a name."""
    if len(chart.lines) < 2:
        return '<ul class="legend"></ul>'
    items = "".join(f"<li>{swatch(line.style, line.dash)}{escape(line.label)}</li>" for line in chart.lines)
    return f'<ul class="legend">{items}</ul>'


def swatch(style: int, dash: int | None = None) -> str:
    """The piece of line that stands before a series' name."""
    return f'<svg class="swatch {_class(style)}" viewBox="0 0 30 10" aria-hidden="true"><path class="line" d="M1 5H29"{_dash(style, dash)}/></svg>'


def _class(style: int) -> str:
    return "ink" if style == _INK else f"s{style % NUM_STYLES}"


def _dash(style: int, dash: int | None) -> str:
    # The seventh run has the first one's colour, and another dash.
    own = max(style, 0) + max(style, 0) // NUM_STYLES
    pattern = _DASHES[(own if dash is None else dash) % len(_DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _marker(x: float, y: float, cross: bool) -> str:
    r = _MARKER
    if cross:
        return f'<path class="cross" d="M{x - r:.1f} {y - r:.1f}L{x + r:.1f} {y + r:.1f}M{x - r:.1f} {y + r:.1f}L{x + r:.1f} {y - r:.1f}"/>'
    return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>'


class _Frame:
    """One chart's pixels."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        self.width = WIDTH - _LEFT - _RIGHT
        self._named = self._named_marks()
        # Marks are named above the frame: whatever the lines do, they never run through a name.
        self.top = _TOP + _MARK_ROW * (max((row for _, _, row in self._named), default=-1) + 1)
        self.height = chart.height - self.top - _BOTTOM

    def _named_marks(self) -> list[tuple[Mark, float, int]]:
        """Upright marks that are in sight, with their share of the width and the row of their name."""
        found: list[tuple[Mark, float, int]] = []
        row_ends: list[float] = []
        for mark in sorted((mark for mark in self._chart.marks if mark.vertical), key=lambda mark: mark.at):
            share = float(self._chart.x.scale.place(np.array(mark.at)))
            if not 0 <= share <= 1:
                continue
            start = share * self.width - 3.4 * len(mark.label)
            row = next((row for row, end in enumerate(row_ends) if start > end), len(row_ends))
            row_ends[row : row + 1] = [start + 6.8 * len(mark.label) + 10]
            found.append((mark, share, row))
        return found

    def _x(self, values: Floats) -> Floats:
        return self._chart.x.scale.place(values) * self.width

    def _y(self, values: Floats) -> Floats:
        return (1 - self._chart.y.scale.place(values)) * self.height

    def grid(self) -> list[str]:
        x, y = self._chart.x, self._chart.y
        right, bottom = _LEFT + self.width, self.top + self.height
        parts = []
        for value, text in y.ticks:
            at = self.top + float(self._y(np.array(value)))
            parts.append(
                f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/><text class="tick" x="{_LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>'
            )
        taken = -math.inf
        for value, text in x.ticks:
            at = _LEFT + float(self._x(np.array(value)))
            parts.append(f'<path class="grid" d="M{at:.1f} {self.top}V{bottom}"/>')
            if at - taken >= max(_MIN_LABEL_GAP, len(text) * 7.5):
                anchor = "end" if at > right - 12 else "middle"
                parts.append(f'<text class="tick" x="{min(at, WIDTH - 2):.1f}" y="{bottom + 17}" text-anchor="{anchor}">{escape(text)}</text>')
                taken = at
        parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
        parts.append(f'<text class="name-of-axis" x="{_LEFT + self.width / 2}" y="{bottom + 37}" text-anchor="middle">{escape(x.label)}</text>')
        middle = self.top + self.height / 2
        parts.append(f'<text class="name-of-axis" transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(y.label)}</text>')
        return parts

    def line(self, line: Line) -> list[str]:
        x, y = self._x(line.x), self._y(line.y)
        parts = [f'<g class="{_class(line.style)}"><title>{escape(line.label)}</title>']
        parts.append(f'<path class="line" d="{_path(x, y)}"{_dash(line.style, line.dash)}/>')
        parts += [self._spot(spot) for spot in line.spots]
        return [*parts, "</g>"]

    def _spot(self, spot: Spot) -> str:
        x, y, low, high = (*self._x(np.array([spot.x])), *self._y(np.array([spot.y, spot.low, spot.high])))
        whisker = f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}"/>' if math.isfinite(low) and math.isfinite(high) else ""
        return whisker + _marker(x, y, spot.cross) if math.isfinite(y) else ""

    def marks(self) -> list[str]:
        level = [mark for mark in self._chart.marks if not mark.vertical and 0 <= float(self._chart.y.scale.place(np.array(mark.at))) <= 1]
        return [self._upright(*named) for named in self._named] + [self._level(mark) for mark in level]

    def _upright(self, mark: Mark, share: float, row: int) -> str:
        x, half = _LEFT + share * self.width, 3.4 * len(mark.label)
        y = self.top - 5 - _MARK_ROW * row
        at = min(max(x, _LEFT + half), WIDTH - half - 2)
        name = f'<text class="mark-name" x="{at:.1f}" y="{y}" text-anchor="middle">{escape(mark.label)}</text>'
        return f'<path class="mark" d="M{x:.1f} {y + 3}V{self.top + self.height}"/>{name}'

    def _level(self, mark: Mark) -> str:
        y, right = self.top + float(self._y(np.array(mark.at))), _LEFT + self.width
        name = f'<text class="mark-name" x="{right - 4}" y="{y - 5:.1f}" text-anchor="end">{escape(mark.label)}</text>'
        return f'<path class="mark" d="M{_LEFT} {y:.1f}H{right}"/>{name}'

    def bands(self) -> list[str]:
        parts = []
        for band in self._chart.bands:
            low, high = np.clip(self._chart.x.scale.place(np.array([band.low, band.high])), 0, 1) * self.width + _LEFT
            box = f'x="{low:.1f}" y="{self.top}" width="{max(0.0, high - low):.1f}" height="{self.height}"'
            parts.append(f'<rect class="band" {box}><title>{escape(band.label)}</title></rect>')
        return parts


def _path(x: Floats, y: Floats) -> str:
    parts, pen_down = [], False
    for at, high in zip(x.tolist(), y.tolist(), strict=True):
        if not (math.isfinite(at) and math.isfinite(high)):
            pen_down = False
            continue
        parts.append(f"{'L' if pen_down else 'M'}{at:.1f} {high:.1f}")
        pen_down = True
    return "".join(parts)
