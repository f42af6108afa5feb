"""Tables and figures as HTML text. Everything that is not made here is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from html import escape

from bench import quantity
from bench.charts import Chart, legend, svg, swatch
from bench.percentiles import Figure

THIN = "†"
THIN_NOTE = f"{THIN} fewer than 5 values lie beyond it."


@dataclass(frozen=True, slots=True)
class Cell:
    """Text, with what stands small below it."""

    text: str
    sub: str = ""
    numeric: bool = True
    warn: bool = False
    thin: bool = False
    """Marked as a percentile that few values lie beyond."""


def row_head(text: str, place: int) -> str:
    """The name of a group, in the first of its rows."""
    return f'<th scope="row">{escape(text)}</th>' if place == 0 else "<td></td>"


def table(caption: str, head: Sequence[str], groups: Sequence[Sequence[Sequence[Cell | str]]], *, left: Collection[int] = (0,), facts: bool = False) -> str:
    """`groups` of rows; a str is a cell whose HTML is already made. Heads of the columns in `left` stand left, as their texts do.

    `facts`: what stands there of a void run is true all the same, and is not struck out.
    """
    heads = "".join(f'<th scope="col"{"" if place in left else " class=n"}>{escape(text)}</th>' for place, text in enumerate(head))
    bodies = "".join(f'<tbody class="group">{"".join(_row(row) for row in rows)}</tbody>' for rows in groups)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    kind = "" if facts else ' class="figures"'
    return f'<div class="scroll"><table{kind}>{title}<thead><tr>{heads}</tr></thead>{bodies}</table></div>'


def _row(cells: Sequence[Cell | str]) -> str:
    return f"<tr>{''.join(cell if isinstance(cell, str) else _cell(cell) for cell in cells)}</tr>"


def _cell(cell: Cell) -> str:
    names = " ".join(name for name, there in (("n", cell.numeric), ("text", not cell.numeric), ("warn", cell.warn)) if there)
    sub = f'<span class="sub">{escape(cell.sub)}</span>' if cell.sub else ""
    thin = f'<span class="thin">{THIN}</span>' if cell.thin else ""
    return f'<td class="{names}">{escape(cell.text)}{thin}{sub}</td>'


def figure_cell(figure: Figure, text: Callable[[float], str]) -> Cell:
    """A figure with its interval below it."""
    told, interval, thin = text(figure.value), figure.interval, figure.thin and math.isfinite(figure.value)
    if interval is None or interval.low == interval.high:
        return Cell(told, thin=thin)
    return Cell(told, f"{text(interval.low)} to {text(interval.high)}", thin=thin)


def times_cell(figure: Figure, factor: float) -> Cell:
    """Of a time in the unit of its row."""
    return figure_cell(figure, lambda value: quantity.number(value * factor) if math.isfinite(value) else quantity.seconds(value))


def run_name(name: str, style: int, *, void: bool) -> str:
    """A run's name behind its line and, when it is void, before a word that says so."""
    tag = ' <span class="tag">VOID</span>' if void else ""
    return f"{swatch(style)}{escape(name)}{tag}"


def charts(of: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(_figure(chart) for chart in of)}</div>'


def _figure(chart: Chart) -> str:
    caption = f'<figcaption><b>{escape(chart.title)}</b><span class="sub">{escape(chart.note)}</span></figcaption>'
    return f"<figure>{caption}{legend(chart)}{svg(chart)}</figure>"
