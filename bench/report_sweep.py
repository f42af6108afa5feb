"""A report's part on a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from bench import quantity
from bench.cost import Price
from bench.goodput import Limits
from bench.html_table import THIN_NOTE, Cell, charts, figure_cell, table, times_cell
from bench.metrics import Summary, measured, summarize
from bench.percentiles import PERCENTILES
from bench.run import Run
from bench.sweep import Found, Probe, Sweep, Verdict
from bench.sweep_plots import over_rate

_PERCENTILES = (PERCENTILES[0], PERCENTILES[-1])


def shown_probes(sweep: Sweep) -> list[Run]:
    """Runs to show in full: the last probe at the knee, the last one just above it, and that of the highest rate."""
    told = [probe for probe in sweep.probes if probe.verdict is not Verdict.VOID]
    if not told:
        return []
    rates = dict.fromkeys(rate for rate in (sweep.knee_per_s, sweep.bad_per_s, max(probe.rate_per_s for probe in told)) if rate is not None)
    last = {probe.rate_per_s: probe for probe in told}
    return [replace(last[rate].run, label=_name(sweep, last[rate])) for rate in rates if rate in last]


def _name(sweep: Sweep, probe: Probe) -> str:
    at = {sweep.knee_per_s: "at the knee", sweep.bad_per_s: "just above the knee"} if sweep.found is Found.KNEE else {}
    return f"{quantity.number(probe.rate_per_s)} requests/s, {at.get(probe.rate_per_s, probe.verdict.value)}"


def sweep_verdict(sweep: Sweep) -> str:
    """The first thing a reader sees: one item of the list of verdicts."""
    knee, bad = sweep.knee_per_s, sweep.bad_per_s
    search = sweep.search
    asked = f"{quantity.percent_tick(search.min_attainment)} of the requests within {search.limits}, and a queue that does not grow"
    if sweep.found is Found.KNEE and knee is not None and bad is not None:
        word, text = "KNEE", f"<b>{quantity.number(knee)} requests/s</b> are served well, {quantity.number(bad)} are not: {escape(asked)}."
    elif sweep.found is Found.ABOVE_MAX:
        word, text = (
            "NO KNEE",
            f"Served well at every rate up to the highest that was allowed, {quantity.number(search.max_per_s)} requests/s: {escape(asked)}.",
        )
    elif sweep.found is Found.BELOW_MIN:
        word, text = (
            "NO KNEE",
            f"Served badly even at the lowest rate that was allowed, {quantity.number(search.min_per_s)} requests/s. Asked for: {escape(asked)}.",
        )
    elif sweep.found is Found.UNDECIDED:
        word, text = "UNDECIDED", "The knee was not found before the allowed number of probes had run."
    else:
        word, text = "VOID", "The sweep cannot be trusted."
    notes = "".join(f"<li>{escape(note)}</li>" for note in sweep.notes)
    kind = "good" if sweep.found in (Found.KNEE, Found.ABOVE_MAX) else "bad"
    return f'<li class="{kind}"><b class="word">{word}</b>{text}{f"<ul>{notes}</ul>" if notes else ""}</li>'


def sweep_section(sweep: Sweep, limits: Sequence[Limits], price: Price | None) -> str:
    """Charts over the rate and the list of probes. Judged by the sweep's own limits; those of the report stand in its other tables."""
    found = [(probe, summarize(probe.run, (sweep.search.limits, *limits), price)) for probe in sweep.probes if measured(probe.run.records)]
    valid = sorted(((probe, summary) for probe, summary in found if probe.verdict is not Verdict.VOID), key=lambda each: each[0].rate_per_s)
    drawn = charts(over_rate(sweep, valid)) if valid else "<p>Every probe was void.</p>"
    return f"<h2>Over the rate</h2>{drawn}<h2>Probes</h2>{_by_rate(valid)}{_in_order(sweep, valid)}"


def _by_rate(valid: Sequence[tuple[Probe, Summary]]) -> str:
    columns = [(get, percent) for get in ("ttft", "tpot", "e2e") for percent in _PERCENTILES]
    figures = [[getattr(summary, get).percentile(percent) for _, summary in valid] for get, percent in columns]
    units = [quantity.unit_for(max((figure.value for figure in column if math.isfinite(figure.value)), default=0.0)) for column in figures]
    names = [f"{get.upper()} p{percent}, {unit}" for (get, percent), (unit, _) in zip(columns, units, strict=True)]
    head = ["requests/s", "verdict", "attainment", *names, "good requests/s", "output tokens/s"]
    rows: list[list[Cell | str]] = []
    for place, (probe, summary) in enumerate(valid):
        times = [times_cell(column[place], factor) for column, (_, factor) in zip(figures, units, strict=True)]
        rates = [figure_cell(summary.goodput[0].per_s, quantity.number), Cell(quantity.number(summary.throughput.steady.output_tokens_per_s))]
        rows.append([Cell(quantity.number(probe.rate_per_s)), _verdict(probe), figure_cell(probe.attainment, quantity.share), *times, *rates])
    return table(f"By rate; a rate that was tried again stands here again. {THIN_NOTE}", head, [rows], left=(1,)) if rows else ""


def _verdict(probe: Probe) -> Cell:
    return Cell(probe.verdict.value, numeric=False, warn=probe.verdict is not Verdict.GOOD)


def _in_order(sweep: Sweep, valid: Sequence[tuple[Probe, Summary]]) -> str:
    rows: list[list[Cell | str]] = []
    for place, probe in enumerate(sweep.probes, start=1):
        steady = probe.stability
        growth = "" if steady is None else quantity.share(steady.growth_share)
        lag = "" if steady is None else quantity.share(steady.lag_share)
        told = [Cell(str(place)), Cell(quantity.number(probe.rate_per_s)), _verdict(probe), Cell(growth), Cell(lag), Cell(probe.reason, numeric=False)]
        rows.append([*told])
    note = "In the order in which they ran. Growth: requests that stay behind, of those that come, by the slope of what is out. Lag: the same by its two ends."
    inner = table(note, ["probe", "requests/s", "verdict", "growth", "lag", "why it is not good"], [rows], left=(2, 5), facts=True)
    return f"<details><summary>All {len(sweep.probes)} probes, the void ones too, with reasons</summary>{inner}</details>"
