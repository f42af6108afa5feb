"""A report's tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bench import quantity
from bench.html_table import THIN_NOTE, Cell, figure_cell, row_head, run_name, table, times_cell
from bench.percentiles import PERCENTILES, Distribution, Figure
from bench.plots import Shown
from bench.record import Outcome
from bench.throughput import Rates

_PLAN_NAMES = {
    "loop": "loop",
    "workload": "workload",
    "arrivals": "arrivals",
    "concurrency": "concurrency",
    "scale": "scale of all lengths",
    "seed": "seed",
    "num_requests": "requests",
    "num_warm_up": "warm-up, in no figure",
    "num_prompt_tokens": "prompt tokens together",
    "num_output_tokens": "output tokens together",
    "prompt_tokens": "prompt tokens each",
    "output_tokens": "output tokens each",
    "rate_per_s": "requests due in a second",
    "gap_cv": "gaps, deviation by mean (Poisson: 1)",
    "dispersion_1s": "requests in 1 s, variance by mean (Poisson: 1)",
    "dispersion_10s": "requests in 10 s, variance by mean (Poisson: 1)",
    "shared_token_ratio": "of prompt tokens seen before",
}
_LOOPS = {"open": "open: each request at its own time, whatever became of those before it", "closed": "closed: the next one is sent when one has ended"}
_FEW_LOST = 0.99


def _run(each: Shown) -> str:
    return f"<td>{run_name(each.name, each.style, void=bool(each.run.void))}</td>"


def _below(each: Shown) -> str:
    """An empty cell, in a row that goes on with the run of the one above."""
    return '<td class="of-void"></td>' if each.run.void else "<td></td>"


def in_short(shown: Sequence[Shown]) -> str:
    """The few figures that decide, one row for each run."""
    limits = shown[0].summary.goodput[0].limits if shown[0].summary.goodput else None
    price = next((each.summary.cost.price for each in shown if each.summary.cost is not None), None)
    head = ["run", *(["good requests/s", "attainment"] if limits is not None else [])]
    of = [[(one, percent) for one, percent in headlines(each)] for each in shown]
    units = []
    for column in zip(*of, strict=True):
        unit, factor = quantity.unit_for(max((one.percentile(percent).value for one, percent in column), default=0.0))
        units.append(factor)
        head.append(f"{column[0][0].name} p{column[0][1]}, {unit}")
    head += ["output tokens/s", *([f"{price.currency} per million output"] if price is not None else [])]
    rows: list[list[Cell | str]] = []
    for each, times in zip(shown, of, strict=True):
        cells = [figure_cell(each.summary.goodput[0].per_s, quantity.number), figure_cell(each.summary.goodput[0].attainment, quantity.share)] if limits else []
        cells += [times_cell(one.percentile(percent), factor) for (one, percent), factor in zip(times, units, strict=True)]
        cells.append(Cell(quantity.number(each.summary.throughput.steady.output_tokens_per_s)))
        if each.summary.cost is not None:
            cells.append(Cell(quantity.number(each.summary.cost.per_million_output)))
        rows.append([_run(each), *cells])
    return table(f"Good: {limits}." if limits is not None else "", head, [rows])


def headlines(each: Shown) -> list[tuple[Distribution, int]]:
    summary = each.summary
    return [(summary.ttft, 50), (summary.ttft, 99), (summary.tpot, 50), (summary.itl, 99), (summary.e2e, 50)]


def asked(shown: Sequence[Shown]) -> str:
    """What was asked of each run: rows are its parts, columns the runs."""
    parts: list[tuple[str, list[str]]] = [("target", [each.run.target for each in shown])]
    keys = dict.fromkeys([*_PLAN_NAMES, *(key for each in shown for key in each.run.plan)])
    for key in keys:
        told = [_plan_part(key, each.run.plan.get(key)) for each in shown]
        if any(told) or key == "loop":
            parts.append((_PLAN_NAMES.get(key, key.replace("_", " ")), told))
    parts.append(("started", [each.run.started_at for each in shown]))
    parts.append(("took", [f"{quantity.number(each.run.duration_s, 4)} s" for each in shown]))
    cold = [", ".join(f"{key.removesuffix('_s').upper()} {quantity.seconds(value)}" for key, value in each.run.cold_start.items()) for each in shown]
    if any(cold):
        parts.append(("cold start, in no figure", cold))
    return _by_run("", shown, parts)


def _plan_part(key: str, value: Any) -> str:
    if key == "loop":
        return _LOOPS.get(str(value), f"{value or 'not stated'}")
    if isinstance(value, dict):
        return ", ".join(f"{name} {quantity.number(each, 4)}" for name, each in value.items())
    return "" if value is None else f"{value:,}".replace(",", "\u202f") if isinstance(value, int) and key != "seed" else str(value)


def _by_run(caption: str, shown: Sequence[Shown], parts: Sequence[tuple[str, Sequence[str]]], *, mark_differences: bool = False) -> str:
    heads = "".join(f'<th scope="col">{run_name(each.name, each.style, void=bool(each.run.void))}</th>' for each in shown)
    rows = []
    for name, told in parts:
        differs = mark_differences and len(set(told)) > 1
        cells = "".join(f'<td class="text">{escape(text)}</td>' for text in told)
        rows.append(f'<tr{" class=differs" if differs else ""}><th scope="row">{escape(name)}</th>{cells}</tr>')
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{title}<thead><tr><th></th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def latencies(shown: Sequence[Shown]) -> str:
    """One group for each quantity, one row for each run."""
    head = ["", "run", "mean", *(f"p{percent}" for percent in PERCENTILES), "max", "requests in it"]
    groups = []
    for get in ("ttft", "ttft_sent", "tpot", "itl", "e2e", "e2e_sent"):
        of = [(each, getattr(each.summary, get)) for each in shown]
        unit, factor = quantity.unit_for(max((one.percentile(99).value for _, one in of if math.isfinite(one.percentile(99).value)), default=0.0))
        rows: list[list[Cell | str]] = []
        for place, (each, one) in enumerate(of):
            rows.append([row_head(f"{one.name.replace('ITL', 'ITL (gap)')}, {unit}", place), _run(each), *_times(one, factor), _in_it(one, each)])
            if one.of_all and one.num_requests < one.num_all:
                nevers = [times_cell(Figure(value), factor) for _, value in one.of_all]
                rows.append([_below(each), '<td class="all">over all, a failure as never</td>', Cell(""), *nevers, Cell(""), Cell("")])
        groups.append(rows)
    groups.append([_messages(each, place) for place, each in enumerate(shown)])
    note = f"Below a figure its 95 % interval, by a bootstrap of blocks of requests. {THIN_NOTE}"
    return table(note, head, groups, left=(0, 1))


def _times(one: Distribution, factor: float) -> list[Cell]:
    figures = [one.mean, *(figure for _, figure in one.percentiles), Figure(one.max)]
    return [times_cell(figure, factor) for figure in figures]


def _in_it(one: Distribution, of: Shown) -> Cell:
    """Marked where failures are missing in it: an answer of one token has no TPOT, and nothing was lost."""
    part = one.num_requests / one.num_all if one.num_all else math.nan
    text = f"{quantity.count(one.num_requests)} of {quantity.count(one.num_all)}"
    values = f"{quantity.count(one.num_values)} values" if one.num_values != one.num_requests else ""
    return Cell(text, f"{quantity.share(part)}{', ' + values if values else ''}", warn=of.summary.counts.num_missed > (1 - _FEW_LOST) * one.num_all)


def _messages(each: Shown, place: int) -> list[Cell | str]:
    one = each.summary.tokens_per_message
    figures = [one.mean, *(figure for _, figure in one.percentiles), Figure(one.max)]
    return [row_head("tokens per message", place), _run(each), *(figure_cell(figure, quantity.number) for figure in figures), _in_it(one, each)]


def goodputs(shown: Sequence[Shown]) -> str:
    """One group for each set of limits."""
    groups = []
    for place, limits in enumerate(one.limits for one in shown[0].summary.goodput):
        rows: list[list[Cell | str]] = []
        for nth, each in enumerate(shown):
            one = each.summary.goodput[place]
            cells = [figure_cell(one.per_s, quantity.number), figure_cell(one.attainment, quantity.share)]
            good = Cell(f"{quantity.count(one.num_good)} of {quantity.count(one.num_requests)}")
            rows.append([row_head(str(limits), nth), _run(each), *cells, good])
        groups.append(rows)
    note = "Requests that met every limit of the set, from their scheduled times. One that was refused, failed or came out wrong met none."
    return table(note, ["limits", "run", "good requests/s", "attainment", "good"], groups, left=(0, 1))


def rates(shown: Sequence[Shown]) -> str:
    """Requests and tokens a second, and what they cost."""
    price = next((each.summary.cost.price for each in shown if each.summary.cost is not None), None)
    head = ["run", "window", "requests/s", "prompt tokens/s", "output tokens/s", "all tokens/s"]
    if price is not None:
        head += [f"{price.currency} per million output tokens", f"{price.currency} per million tokens"]
    groups: list[list[list[Cell | str]]] = []
    for each in shown:
        found = each.summary.throughput
        steady, whole = _rates("steady", found.steady), _rates("whole run", found.whole)
        if each.summary.cost is not None:
            steady += [Cell(quantity.number(each.summary.cost.per_million_output)), Cell(quantity.number(each.summary.cost.per_million_total))]
            whole += [Cell(""), Cell("")]
        groups.append([[_run(each), *steady], [_below(each), *whole]])
    paid = ""
    if price is not None:
        devices = "1 device" if price.num_devices == 1 else f"{price.num_devices} devices"
        paid = f" Cost: {devices} at {price.per_device_hour:g} {price.currency} an hour each, at the steady rate."
    note = f"Only requests that ended well give requests and tokens. Steady: from the end of the ramp to the last request's time.{paid}"
    return table(note, head, groups, left=(0, 1))


def _rates(name: str, found: Rates) -> list[Cell]:
    values = (found.requests_per_s, found.prompt_tokens_per_s, found.output_tokens_per_s, found.total_tokens_per_s)
    return [
        Cell(name, f"{quantity.number(found.start_s)} to {quantity.number(found.end_s)} s", numeric=False),
        *(Cell(quantity.number(value)) for value in values),
    ]


def ends(shown: Sequence[Shown]) -> str:
    """How requests ended, and why those that did not end well."""
    head = ["run", "requests", *(outcome.value for outcome in Outcome)]
    rows: list[list[Cell | str]] = []
    for each in shown:
        counts = each.summary.counts
        by = [
            Cell(quantity.count(num), quantity.share(num / counts.num_requests), warn=outcome is not Outcome.OK and num > 0)
            for outcome, num in counts.by_outcome
        ]
        rows.append([_run(each), Cell(quantity.count(counts.num_requests)), *by])
    reasons: list[list[Cell | str]] = []
    for each in shown:
        for outcome, error, num in each.summary.counts.reasons[:20]:
            reasons.append([_run(each), Cell(outcome.value, numeric=False), Cell(error or "no reason was given", numeric=False), Cell(quantity.count(num))])
        if len(each.summary.counts.reasons) > 20:
            rest = each.summary.counts.reasons[20:]
            reasons.append(
                [_run(each), Cell("", numeric=False), Cell(f"{len(rest)} other reasons", numeric=False), Cell(quantity.count(sum(num for _, _, num in rest)))]
            )
    found = table("", head, [rows], facts=True)
    return found + (table("By reason", ["run", "outcome", "reason", "requests"], [reasons], left=(0, 1, 2), facts=True) if reasons else "")


def compared(shown: Sequence[Shown]) -> str:
    """Each run's figures over those of the first one. Void runs are compared with nothing."""
    first = shown[0]
    parts = [(f"{name} p{percent}", get, percent) for name, get in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2e")) for percent in (50, 99)]
    head = ["run", *(name for name, _, _ in parts), "output tokens/s", *(["goodput"] if first.summary.goodput else [])]
    rows: list[list[Cell | str]] = []
    for each in shown[1:]:
        if first.run.void or each.run.void:
            rows.append([_run(each), *(Cell("void") for _ in head[1:])])
            continue
        ratios = [_ratio(getattr(each.summary, get).percentile(percent), getattr(first.summary, get).percentile(percent)) for _, get, percent in parts]
        ratios.append(_ratio(Figure(each.summary.throughput.steady.output_tokens_per_s), Figure(first.summary.throughput.steady.output_tokens_per_s)))
        if first.summary.goodput:
            ratios.append(_ratio(each.summary.goodput[0].per_s, first.summary.goodput[0].per_s))
        rows.append([_run(each), *ratios])
    note = (
        f"Times the figure of {first.name}. ≈: the two intervals overlap. Intervals know the chance within a run, not that between runs: repeat both (A B B A)."
    )
    return table(note, head, [rows])


def _ratio(one: Figure, other: Figure) -> Cell:
    ratio = one.value / other.value if other.value else math.nan
    overlap = one.interval is not None and other.interval is not None and one.interval.low <= other.interval.high and other.interval.low <= one.interval.high
    return Cell(("≈ " if overlap else "") + (f"{quantity.number(ratio)} ×" if math.isfinite(ratio) else quantity.NONE))


def environment(shown: Sequence[Shown]) -> str:
    """Everything that was recorded; what differs between runs stands out."""
    flat = [dict(_flat(each.run.environment)) for each in shown]
    keys = dict.fromkeys(key for one in flat for key in one)
    parts = [(key, [one.get(key, "") for one in flat]) for key in keys]
    return _by_run("", shown, parts, mark_differences=True)


def _flat(fields: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in fields.items():
        name = f"{prefix}{key.replace('_', ' ')}" if not prefix else f"{prefix}{key}"
        if isinstance(value, Mapping):
            found += _flat(value, f"{name}: ")
        elif isinstance(value, list | tuple):
            found.append((name, ", ".join(str(each) for each in value)))
        else:
            found.append((name, "" if value is None else str(value)))
    return [(name, text) for name, text in found if text]
