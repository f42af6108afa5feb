"""Tables and figures as HTML text. Everything that is not made here is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


def table(caption: str, head: Sequence[str], groups: Sequence[Sequence[Sequence[Cell | str]]], *, num_names: int = 1) -> str:
    """`groups` of rows; a str is a cell whose HTML is already made. The first `num_names` columns are names, and their heads stand left."""
    heads = "".join(f'<th scope="col"{"" if place < num_names else " class=n"}>{escape(text)}</th>' for place, text in enumerate(head))
    bodies = "".join(f'<tbody class="group">{"".join(_row(row) for row in rows)}</tbody>' for rows in groups)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{title}<thead><tr>{heads}</tr></thead>{bodies}</table></div>'


def _row(cells: Sequence[Cell | str]) -> str:
    return f"<tr>{''.join(cell if isinstance(cell, str) else _cell(cell) for cell in cells)}</tr>"


def _cell(cell: Cell) -> str:
    names = " ".join(name for name, there in (("n", cell.numeric), ("text", not cell.numeric), ("warn", cell.warn)) if there)
    sub = f'<span class="sub">{escape(cell.sub)}</span>' if cell.sub else ""
    return f'<td class="{names}">{escape(cell.text)}{sub}</td>'


def figure_cell(figure: Figure, text: Callable[[float], str]) -> Cell:
    """A figure with its interval below it."""
    told = text(figure.value) + (THIN if figure.thin and math.isfinite(figure.value) else "")
    interval = figure.interval
    return Cell(told, "" if interval is None else f"{text(interval.low)} to {text(interval.high)}")


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
