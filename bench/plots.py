"""Which charts a report has, and what they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench import quantity
from bench.charts import Axis, Chart, Line, Mark, Scale, fitting, linear, logarithmic, span_of
from bench.goodput import Limits, good
from bench.metrics import Summary, Times, measured
from bench.percentiles import Floats
from bench.run import Run

_SHARES = Axis("share of requests", Scale(0, 1), tuple((share, quantity.percent_tick(share)) for share in (0, 0.25, 0.5, 0.75, 0.9, 1)))
_MAX_POINTS = 400


@dataclass(frozen=True, slots=True)
class Shown:
    """A run as a report shows it."""

    run: Run
    summary: Summary
    times: Times
    name: str
    """Its label, told apart from others of the same one."""
    style: int

    @classmethod
    def of(cls, run: Run, summary: Summary, name: str, style: int) -> Shown:
        return cls(run, summary, Times.of(measured(run.records)), name, style)


def distributions(shown: Sequence[Shown], limits: Sequence[Limits]) -> list[Chart]:
    """TTFT, TPOT, ITL and E2E: the share of requests, or of gaps, that were at most so slow."""
    ends = "The line ends where all that ended well are counted: what failed is never reached."
    parts: list[tuple[str, str, Callable[[Times], Floats], Callable[[Times], int], list[float | None]]] = [
        (
            "Time to first token (TTFT)",
            f"From the scheduled time. {ends}",
            lambda of: of.ttft_s[of.ok],
            lambda of: len(of.ok),
            [each.ttft_s for each in limits],
        ),
        (
            "Time per output token (TPOT)",
            "One value for each request of two tokens or more.",
            lambda of: of.tpot_s[of.ok],
            lambda of: 0,
            [each.tpot_s for each in limits],
        ),
        ("Gaps between messages (ITL)", "Each gap of each request that ended well.", lambda of: of.gaps_s, lambda of: 0, []),
        ("End to end (E2E)", f"From the scheduled time. {ends}", lambda of: of.e2e_s[of.ok], lambda of: len(of.ok), [each.e2e_s for each in limits]),
    ]
    charts = []
    for title, note, values_of, num_all_of, marks in parts:
        lines = [_cdf(each.name, values_of(each.times), num_all_of(each.times), each.style) for each in shown]
        axis = _time_axis(title, [line.x for line in lines])
        share = _SHARES if num_all_of(shown[0].times) else replace(_SHARES, label="share of gaps" if "ITL" in title else "share of requests")
        lines_at = tuple(Mark(limit, f"limit {quantity.seconds_tick(limit)}") for limit in dict.fromkeys(marks) if limit is not None)
        charts.append(Chart(title, note, _alt_of_cdf(title, lines), axis, share, tuple(lines), lines_at))
    return charts


def _cdf(name: str, values: Floats, num_all: int, style: int) -> Line:
    ordered = np.sort(values[np.isfinite(values)])
    if not len(ordered):
        return Line(name, np.array([]), np.array([]), style)
    places = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _MAX_POINTS)).astype(np.int64))
    places = np.unique(np.concatenate([places, np.maximum(len(ordered) - 1 - np.arange(min(20, len(ordered))), 0)]))
    shares = (places + 1) / (num_all or len(ordered))
    # From the axis up: with few requests the first one is a step of its own.
    return Line(name, np.concatenate([ordered[places[:1]], ordered[places]]), np.concatenate([[0.0], shares]), style)


def _time_axis(title: str, parts: Sequence[Floats], *, unit: str = "") -> Axis:
    low, high = span_of(parts)
    label = title if not unit else f"{title}, {unit}"
    # A few values near 0, such as gaps within one read of the socket, must not push all others into a corner.
    values = np.concatenate([part[np.isfinite(part)] for part in parts]) if parts else np.array([])
    low = max(float(np.percentile(values, 0.5)), high / 1e4, 1e-6) if len(values) else low
    return fitting(label, low, high * 1.02, quantity.seconds_tick, tight=True)


def _alt_of_cdf(title: str, lines: Sequence[Line]) -> str:
    said = []
    for line in lines:
        if len(line.x):
            reached = float(line.y[-1])
            said.append(f"{line.label}: from {quantity.seconds(float(line.x[0]))} to {quantity.seconds(float(line.x[-1]))}, reaching {quantity.share(reached)}")
    return f"Cumulative distribution of {title}. " + ("; ".join(said) or "No values.")


def goodput_over_limits(shown: Sequence[Shown], limits: Sequence[Limits]) -> list[Chart]:
    """How goodput moves when one limit does, the others of the first set as they are."""
    first = limits[0] if limits else Limits()
    charts = []
    for field, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        others = replace(first, **{field: None})
        values = [(each.times.ttft_s if field == "ttft_s" else each.times.tpot_s)[each.times.ok] for each in shown]
        finite = np.concatenate([value[np.isfinite(value)] for value in values])
        if not len(finite):
            continue
        low, high = max(float(np.percentile(finite, 1)) / 1.5, 1e-5), max(float(finite.max()) * 1.1, getattr(first, field) or 0)
        at = np.geomspace(low, max(high, low * 2), 160)
        lines = tuple(_goodput_line(each, field, others, at) for each in shown)
        most = max(float(line.y.max()) for line in lines)
        marks = tuple(
            Mark(limit, f"limit {quantity.seconds_tick(limit)}") for limit in dict.fromkeys(getattr(each, field) for each in limits) if limit is not None
        )
        note = f"Requests a second that keep the limit on the axis; besides it: {others}."
        alt = f"Goodput over the limit on {title}. " + "; ".join(f"{line.label}: up to {quantity.number(float(line.y.max()))} requests/s" for line in lines)
        x = logarithmic(f"limit on {title}", float(at[0]), float(at[-1]), quantity.seconds_tick)
        charts.append(Chart(f"Goodput over the limit on {title}", note, alt, x, linear("good requests/s", most * 1.02, quantity.tick), lines, marks))
    return charts


def _goodput_line(each: Shown, field: str, others: Limits, at: Floats) -> Line:
    times = each.times
    kept = good(others, times.ok, times.ttft_s, times.tpot_s, times.e2e_s)
    values = np.nan_to_num((times.ttft_s if field == "ttft_s" else times.tpot_s)[kept], nan=0.0)  # one token: no TPOT, and any limit is kept
    whole = each.summary.throughput.whole
    reached = np.searchsorted(np.sort(values), at, side="right")
    return Line(each.name, at, reached / max(whole.end_s - whole.start_s, 1e-9), each.style)


def send_lag(shown: Sequence[Shown]) -> Chart | None:
    """None when all loops are closed: nothing has a time there."""
    opened = [each for each in shown if any(record.due_s is not None for record in each.run.records)]
    if not opened:
        return None
    lines = tuple(_cdf(each.name, np.maximum(each.times.lag_s, 1e-6), 0, each.style) for each in opened)
    alt = "Send lag. " + "; ".join(f"{each.name}: p99 {quantity.seconds(each.run.generator.send_lag_p99_s)}" for each in opened)
    axis = logarithmic("sent minus due", *_decades(lines), quantity.seconds_tick)
    note = "How late the generator itself was. It is in every figure from the schedule, and voids a run when its p99 is too high."
    return Chart("Send lag", note, alt, axis, _SHARES, lines)


def _decades(lines: Sequence[Line]) -> tuple[float, float]:
    low, high = span_of([line.x for line in lines])
    return 10.0 ** math.floor(math.log10(max(low, 1e-5))), 10.0 ** math.ceil(math.log10(max(high, 1e-3)))


def lengths(shown: Sequence[Shown]) -> list[Chart]:
    """What was asked: prompt and answer lengths, of all requests but the warm-up's."""
    charts = []
    for title, field in (("Prompt lengths", "num_prompt_tokens"), ("Answer lengths asked for", "max_tokens")):
        values = [np.array([getattr(record, field) for record in measured(each.run.records)], dtype=np.float64) for each in shown]
        lines = tuple(_cdf(each.name, of, 0, each.style) for each, of in zip(shown, values, strict=True))
        low, high = span_of(values)
        alt = f"{title}. " + "; ".join(f"{each.name}: median {quantity.number(float(np.median(of)))} tokens" for each, of in zip(shown, values, strict=True))
        charts.append(
            Chart(title, "Same lengths, same load: runs are compared only where these lines lie on each other.", alt, _tokens_axis(low, high), _SHARES, lines)
        )
    return charts


def _tokens_axis(low: float, high: float) -> Axis:
    if high <= low:
        return linear("tokens", high * 1.25 + 1, quantity.tick)
    return fitting("tokens", max(low, 1.0), high * 1.02, quantity.tick, tight=True)
