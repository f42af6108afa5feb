"""Charts of one run over its time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bench import quantity
from bench.charts import Axis, Band, Chart, Line, Scale, linear, span_of
from bench.plots import Shown
from bench.timeline import Timeline, timeline

_PANEL_HEIGHT = 190
_KV = Axis("KV cache in use", Scale(0, 1), tuple((share, quantity.percent_tick(share)) for share in (0, 0.5, 1)))


def timelines(each: Shown) -> list[Chart]:
    """Requests, queue, KV cache and tokens over its time, all over the same axis."""
    times = timeline(each.run)
    return [_requests(each, times), *_queue(each, times), _tokens(each, times)]


def _requests(each: Shown, times: Timeline) -> Chart:
    at = times.middles
    lines = [Line("due", at, times.scheduled_per_s, each.style, dash=0), Line("ended", at, times.ended_per_s, -1, dash=2)]
    if times.missed_per_s.any():
        lines.append(Line("not ended well", at, times.missed_per_s, 1 if each.style != 1 else 0, dash=2))
    return _panel(each, times, "Requests", f"Means of {times.piece_s:g} s.", "requests/s", lines)


def _queue(each: Shown, times: Timeline) -> list[Chart]:
    out = Line("out, by the generator", times.middles, times.in_flight, -1, dash=2)
    samples = each.run.samples
    if not samples:
        return [_panel(each, times, "Requests that are out", "The server does not tell its own state.", "requests", [out])]
    at = np.array([sample.at_s for sample in samples])
    running, waiting = np.array([float(sample.num_running) for sample in samples]), np.array([float(sample.num_waiting) for sample in samples])
    lines = [Line("running", at, running, each.style, dash=0), Line("waiting", at, waiting, each.style, dash=1), out]
    found = [_panel(each, times, "Running and waiting", "As the server tells it, and as the generator sees it.", "requests", lines)]
    usage = np.array([math.nan if sample.kv_usage is None else sample.kv_usage for sample in samples])
    if np.isfinite(usage).any():
        line = Line("in use", at, usage, each.style, dash=0)
        found.append(_panel(each, times, "KV cache", "Of the fullest decode instance, as the server tells it.", "", [line], _KV))
    return found


def _tokens(each: Shown, times: Timeline) -> Chart:
    line = Line("output tokens/s", times.middles, times.output_tokens_per_s, each.style, dash=0)
    return _panel(each, times, "Output tokens", f"Means of {times.piece_s:g} s.", "tokens/s", [line])


def _panel(each: Shown, times: Timeline, title: str, note: str, label: str, lines: Sequence[Line], y: Axis | None = None) -> Chart:
    x = linear("seconds from the start", float(times.edges[-1]), quantity.tick, low=float(times.edges[0]), num_ticks=8, tight=True)
    bands = (Band(*times.steady, "steady window"),) if times.steady is not None else ()
    said = ", ".join(f"{line.label} up to {quantity.number(span_of([line.y])[1])}" for line in lines)
    y = y or linear(label, span_of([line.y for line in lines])[1] * 1.02, quantity.tick, num_ticks=3)
    return Chart(title, note, f"{title} over the time of {each.name}: {said}.", x, y, tuple(lines), bands=bands, height=_PANEL_HEIGHT)
