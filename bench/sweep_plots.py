"""Charts of a sweep: what becomes of a server as its load grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from bench import quantity
from bench.charts import Axis, Chart, Line, Mark, Scale, Spot, fitting, linear, span_of
from bench.metrics import Summary
from bench.percentiles import Distribution, Figure
from bench.sweep import Probe, Sweep, Verdict

_SHARES = Axis("attainment", Scale(0, 1), tuple((share, quantity.percent_tick(share)) for share in (0, 0.25, 0.5, 0.75, 1)))
_LATENCY_PERCENTILES = (50, 90, 99)

Measured = Sequence[tuple[Probe, Summary]]
"""Probes that are not void, by rate."""


def over_rate(sweep: Sweep, measured: Measured) -> list[Chart]:
    """Latency, attainment, goodput and tokens over the rate. Empty when every probe was void."""
    if not measured:
        return []
    top = max(probe.rate_per_s for probe, _ in measured)
    x = linear("requests/s asked for", top * 1.04, quantity.tick, num_ticks=8, tight=True)
    knee = (Mark(sweep.knee_per_s, f"knee {quantity.number(sweep.knee_per_s)}/s"),) if sweep.knee_per_s is not None else ()
    limits = sweep.search.limits
    return [
        _latency("TTFT over rate", x, measured, lambda summary: summary.ttft, knee, limits.ttft_s),
        _latency("TPOT over rate", x, measured, lambda summary: summary.tpot, knee, limits.tpot_s),
        _latency("E2E over rate", x, measured, lambda summary: summary.e2e, knee, limits.e2e_s),
        _attainment(sweep, x, measured, knee),
        _goodput(x, measured, knee),
        _tokens(x, measured, knee),
    ]


def _line(label: str, measured: Measured, figures: Sequence[Figure], style: int, dash: int) -> Line:
    """Through the means of each rate's probes; each probe is a spot."""
    of_rate: dict[float, list[float]] = {}
    spots = []
    for (probe, _), figure in zip(measured, figures, strict=True):
        of_rate.setdefault(probe.rate_per_s, []).append(figure.value)
        low, high = (figure.interval.low, figure.interval.high) if figure.interval else (math.nan, math.nan)
        spots.append(Spot(probe.rate_per_s, figure.value, low, high, cross=probe.verdict is not Verdict.GOOD))
    means = np.array([np.mean(values) for values in of_rate.values()])
    return Line(label, np.array(list(of_rate)), means, style, dash, tuple(spots))


def _latency(title: str, x: Axis, measured: Measured, of: Callable[[Summary], Distribution], knee: tuple[Mark, ...], limit_s: float | None) -> Chart:
    # The slowest stands first and in the strongest colour.
    styles = {99: (0, 0), 90: (1, 1), 50: (2, 2)}
    lines = []
    for percent in reversed(_LATENCY_PERCENTILES):
        figures = [of(summary).percentile(percent) for _, summary in measured]
        lines.append(_line(f"p{percent}", measured, figures, *styles[percent]))
    low, high = span_of([np.array([spot.y, spot.low, spot.high]) for line in lines for spot in line.spots])
    high = max(high, limit_s or 0.0)
    marks = (*knee, *((Mark(limit_s, f"limit {quantity.seconds_tick(limit_s)}", vertical=False),) if limit_s is not None else ()))
    said = "; ".join(f"{line.label} from {quantity.seconds(float(line.y[0]))} to {quantity.seconds(float(line.y[-1]))}" for line in lines)
    y = fitting(title.split(" ")[0], low / 1.2, high * 1.05, quantity.seconds_tick)
    return Chart(
        title,
        "Of requests that ended well. Dot: the rate was good; cross: it was bad. Whiskers: 95 % intervals.",
        f"{title}: {said}.",
        x,
        y,
        tuple(lines),
        marks,
    )


def _attainment(sweep: Sweep, x: Axis, measured: Measured, knee: tuple[Mark, ...]) -> Chart:
    line = _line("attainment", measured, [probe.attainment for probe, _ in measured], 0, 0)
    least = Mark(sweep.search.min_attainment, f"at least {quantity.percent_tick(sweep.search.min_attainment)}", vertical=False)
    note = f"Share of all requests that met {sweep.search.limits}; one that failed met nothing."
    alt = f"Attainment over rate, from {quantity.share(float(line.y[0]))} to {quantity.share(float(line.y[-1]))}."
    return Chart("Attainment over rate", note, alt, x, _SHARES, (line,), (*knee, least))


def _goodput(x: Axis, measured: Measured, knee: tuple[Mark, ...]) -> Chart:
    good = _line("good", measured, [summary.goodput[0].per_s for _, summary in measured], 0, 0)
    asked = Line("asked for", good.x, good.x, -1, dash=2)
    ended = _line("ended well", measured, [Figure(summary.throughput.whole.requests_per_s) for _, summary in measured], 1, 1)
    _, high = span_of([good.y, good.x])
    alt = f"Goodput over rate, at most {quantity.number(span_of([good.y])[1])} good requests/s."
    note = "Over the whole of each probe, its drain included."
    return Chart("Goodput over rate", note, alt, x, linear("requests/s", high * 1.02, quantity.tick), (good, ended, asked), knee)


def _tokens(x: Axis, measured: Measured, knee: tuple[Mark, ...]) -> Chart:
    output = _line("output", measured, [Figure(summary.throughput.steady.output_tokens_per_s) for _, summary in measured], 0, 0)
    prompt = _line("prompt", measured, [Figure(summary.throughput.steady.prompt_tokens_per_s) for _, summary in measured], 1, 1)
    low, high = span_of([output.y, prompt.y])
    alt = f"Tokens a second over rate: output up to {quantity.number(span_of([output.y])[1])}, prompt up to {quantity.number(span_of([prompt.y])[1])}."
    y = fitting("tokens/s", low, high * 1.02, quantity.tick)
    return Chart("Tokens over rate", "In the steady window of each probe.", alt, x, y, (output, prompt), knee)
