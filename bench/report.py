"""One HTML file that holds everything about one run, several side by side, or a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from bench import quantity, report_tables
from bench.cost import Price
from bench.goodput import Limits
from bench.html_table import charts, run_name
from bench.metrics import measured, summarize
from bench.percentiles import Figure
from bench.plots import Shown, distributions, goodput_over_limits, lengths, send_lag
from bench.report_style import STYLE
from bench.report_sweep import shown_probes, sweep_section, sweep_verdict
from bench.report_words import DEFINITIONS
from bench.run import Run
from bench.sweep import Sweep
from bench.timeline_plots import timelines

_MAX_OPEN_TIMELINES = 4
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(
    path: Path, runs: Sequence[Run], sweep: Sweep | None = None, *, limits: Sequence[Limits] = (), price: Price | None = None, title: str = ""
) -> Path:
    """Writes it and returns its path. Beside a sweep `runs` may be empty: those of its probes that matter are shown.

    Nothing in the file is loaded from elsewhere, and nothing in it runs. Raises ValueError when there is nothing to report. Without `limits` those of
    the sweep are taken.
    """
    page = report(runs, sweep, limits=limits, price=price, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def report(runs: Sequence[Run], sweep: Sweep | None = None, *, limits: Sequence[Limits] = (), price: Price | None = None, title: str = "") -> str:
    """The page itself."""
    limits = tuple(limits) or ((sweep.search.limits,) if sweep is not None else ())
    chosen = list(runs) or ([] if sweep is None else shown_probes(sweep))
    told = [run for run in chosen if measured(run.records)]
    empty = [run for run in chosen if not measured(run.records)]
    if not told and sweep is None:
        raise ValueError("there is nothing to report: no run has a record outside its warm-up")
    summaries = [summarize(run, limits, price) for run in told]
    shown = [Shown.of(run, summary, name, place) for place, (run, summary, name) in enumerate(zip(told, summaries, _names(told), strict=True))]
    title = title or _title(shown, sweep)
    parts = [_header(title, shown, empty, sweep)]
    if sweep is not None:
        parts.append(sweep_section(sweep, limits, price))
    if shown:
        parts += _sections(shown, limits)
    parts.append(DEFINITIONS)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += (
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>\n'


def _names(runs: Sequence[Run]) -> list[str]:
    """Labels; those that stand for several runs get a number."""
    counts, seen, names = Counter(run.label for run in runs), Counter[str](), []
    for run in runs:
        seen[run.label] += 1
        names.append(f"{run.label} ({seen[run.label]})" if counts[run.label] > 1 else run.label)
    return names


def _title(shown: Sequence[Shown], sweep: Sweep | None) -> str:
    if sweep is not None:
        return "Load test: search for the knee"
    return f"Load test: {len(shown)} runs side by side" if len(shown) > 2 else f"Load test: {' and '.join(each.name for each in shown)}"


def _header(title: str, shown: Sequence[Shown], empty: Sequence[Run], sweep: Sweep | None) -> str:
    # A sweep tells its own verdict; of the runs that it shows only void ones need a word.
    verdicts = "".join(_verdict(each) for each in shown if sweep is None or each.run.void)
    verdicts += "".join(f'<li class="bad"><b class="word">VOID</b>{escape(run.label)}: no request but the warm-up\'s</li>' for run in empty)
    first = sweep_verdict(sweep) if sweep is not None else ""
    loops = sorted({str(each.run.plan.get("loop", "not stated")) for each in shown})
    loop = f'<p class="quiet">Loop: <b>{escape(" and ".join(loops))}</b>. Times count from the schedule unless it says otherwise.</p>' if loops else ""
    return f'<header><h1>{escape(title)}</h1>{loop}<ul class="verdicts">{first}{verdicts}</ul></header>'


def _verdict(each: Shown) -> str:
    health = each.run.generator
    lag = f"send lag p50 {quantity.seconds(health.send_lag_p50_s)}, p99 {quantity.seconds(health.send_lag_p99_s)}"
    late = f", {quantity.count(health.num_late)} sent late" if health.num_late else ""
    fared = f'<span class="sub">{escape(f"The generator: {lag}, {quantity.share(health.cpu)} of a core{late}.")}</span>'
    missed = each.summary.counts.num_missed
    lost = f" {quantity.count(missed)} of {quantity.count(each.summary.counts.num_requests)} requests did not end well." if missed else ""
    if each.run.void:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in each.run.void)
        return f'<li class="bad"><b class="word">VOID</b>{escape(each.name)}: its figures cannot be trusted.{lost} {fared}<ul>{reasons}</ul></li>'
    return f'<li class="good"><b class="word">VALID</b>{escape(each.name)}.{lost} {fared}</li>'


def _sections(shown: Sequence[Shown], limits: Sequence[Limits]) -> list[str]:
    parts = ["<h2>In short</h2>", _cards(shown[0]) if len(shown) == 1 else report_tables.in_short(shown)]
    if len(shown) > 1:
        parts += [f"<h2>Compared with {escape(shown[0].name)}</h2>", report_tables.compared(shown)]
    parts += ["<h2>What was asked</h2>", report_tables.asked(shown)]
    parts += ["<h2>Latency</h2>", report_tables.latencies(shown), charts(distributions(shown, limits))]
    parts += ["<h2>Goodput</h2>", report_tables.goodputs(shown) if limits else "<p>No limits were given.</p>", charts(goodput_over_limits(shown, limits))]
    parts += ["<h2>Rates and cost</h2>", report_tables.rates(shown)]
    parts += ["<h2>How requests ended</h2>", report_tables.ends(shown)]
    parts.append("<h2>Over time</h2><p class='sub'>Shaded: the steady window. All of a run's requests are here, its warm-up's too.</p>")
    for place, each in enumerate(shown):
        tag = ' <span class="tag">VOID</span>' if each.run.void else ""
        inner = f"<h3>{escape(each.name)}{tag}</h3>{charts(timelines(each))}"
        parts.append(inner if place < _MAX_OPEN_TIMELINES else f"<details><summary>{escape(each.name)}</summary>{inner}</details>")
    lag = send_lag(shown)
    parts += ["<h2>Workload and generator</h2>", charts([*lengths(shown), *([lag] if lag is not None else [])])]
    parts.append("" if lag is not None else "<p>The loop is closed: no request has a time of its own to be late for.</p>")
    parts += ["<h2>Environment</h2>", report_tables.environment(shown)]
    return parts


def _cards(each: Shown) -> str:
    summary = each.summary
    steady = summary.throughput.steady
    parts = []
    for one, percent in report_tables.headlines(each):
        figure = one.percentile(percent)
        parts.append((f"{one.name} p{percent}", quantity.seconds(figure.value), _span(figure)))
    if summary.goodput:
        best = summary.goodput[0]
        met = f"{quantity.share(best.attainment.value)} of requests met {best.limits}"
        parts.insert(0, ("good requests/s", quantity.number(best.per_s.value), met))
    parts.append(("output tokens/s", quantity.number(steady.output_tokens_per_s), f"and {quantity.number(steady.prompt_tokens_per_s)} prompt tokens/s"))
    if summary.cost is not None:
        cost = summary.cost
        parts.append(("cost", f"{quantity.number(cost.per_million_output)} {cost.price.currency}", "per million output tokens"))
    cards = "".join(
        f'<div class="card"><div class="what">{escape(what)}</div><div class="value">{escape(value)}</div><div class="sub">{escape(sub)}</div></div>'
        for what, value, sub in parts
    )
    return f'<div class="name">{run_name(each.name, each.style, void=bool(each.run.void))}</div><div class="cards">{cards}</div>'


def _span(figure: Figure) -> str:
    return "" if figure.interval is None else f"{quantity.seconds(figure.interval.low)} to {quantity.seconds(figure.interval.high)}"
