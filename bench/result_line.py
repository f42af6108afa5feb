"""How a run ends on the terminal: its figures in a table, and one line that a script can read."""

from __future__ import annotations

import math
from enum import Enum

from rich.table import Table

from bench.goodput import Limits
from bench.metrics import Summary
from bench.percentiles import PERCENTILES, Distribution
from bench.record import Outcome
from bench.run import Run
from bench.sweep import Found, Sweep

_MS = 1e3


class Verdict(Enum):
    """Exit codes. SHORT: no request ended well. VOID: the run cannot be trusted."""

    OK = 0
    SHORT = 1
    VOID = 2


def verdict_of(run: Run) -> Verdict:
    """Of one run."""
    if run.void:
        return Verdict.VOID
    served = any(record.outcome is Outcome.OK for record in run.records if not record.warm_up)
    return Verdict.OK if served else Verdict.SHORT


def result_line(run: Run, summary: Summary | None) -> str:
    """`OK bench key=value ...`; `summary` is None of a run that measured nothing."""
    values: dict[str, str] = {"label": run.label.replace(" ", "_"), "loop": run.plan["loop"]}
    if summary is not None:
        values |= {"requests": str(summary.counts.num_requests)}
        values |= {outcome.value: str(count) for outcome, count in summary.counts.by_outcome if count or outcome is Outcome.OK}
        for distribution in (summary.ttft, summary.tpot, summary.itl, summary.e2e):
            values |= {f"{distribution.name.lower()}_p{percent}_ms": _milliseconds(distribution, percent) for percent in (50, 99)}
        values |= {"output_tokens_per_s": _figure(summary.throughput.whole.output_tokens_per_s)}
        values |= {_goodput_key(each.limits, place): _figure(each.per_s.value) for place, each in enumerate(summary.goodput)}
    values |= {"lag_p99_ms": f"{run.generator.send_lag_p99_s * _MS:.2f}", "cpu": f"{run.generator.cpu:.2f}"}
    return " ".join([verdict_of(run).name, "bench", *(f"{key}={value}" for key, value in values.items())])


def figures(summary: Summary) -> Table:
    """Latencies in milliseconds."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("ms", no_wrap=True)
    for heading in ("mean", *(f"p{percent}" for percent in PERCENTILES), "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = [summary.ttft, summary.ttft_sent, summary.tpot, summary.itl, summary.e2e, summary.e2e_sent]
    for each in shown:
        cells = [each.mean.value, *(figure.value for _, figure in each.percentiles), each.max]
        table.add_row(each.name, *(_figure(value * _MS) for value in cells))
    return table


def facts(run: Run, summary: Summary) -> list[str]:
    """What stands above and below the table, a line each."""
    plan, rates = run.plan, summary.throughput.whole
    lines = [
        f"{plan['loop']} loop, {plan['workload']}, {plan['arrivals']}, lengths x{plan['scale']:g}, seed {plan['seed']}: "
        f"{summary.counts.num_requests} requests and {summary.counts.num_warm_up} of warm-up in {run.duration_s:.1f} s",
        f"{_figure(rates.requests_per_s)} requests/s, {_figure(rates.prompt_tokens_per_s)} prompt and {_figure(rates.output_tokens_per_s)} output tokens/s",
    ]
    lines += [
        f"goodput {each.limits}: {_figure(each.per_s.value)} requests/s, {each.attainment.value:.1%} of the requests ({each.num_good} of {each.num_requests})"
        for each in summary.goodput
    ]
    lines += [f"{outcome.value}: {count} x {reason}" for outcome, reason, count in summary.counts.reasons[:5]]
    if summary.cost is not None:
        currency = summary.cost.price.currency
        lines.append(
            f"{_figure(summary.cost.per_million_output)} {currency} per million output tokens, {_figure(summary.cost.per_million_total)} of all tokens"
        )
    if run.cold_start:
        lines.append(f"cold start, apart: TTFT {run.cold_start['ttft_s'] * _MS:.0f} ms, end {run.cold_start['e2e_s'] * _MS:.0f} ms")
    return lines


def _goodput_key(limits: Limits, place: int) -> str:
    return "goodput_per_s" if place == 0 else f"goodput_{place + 1}_per_s"


def _milliseconds(distribution: Distribution, percent: int) -> str:
    return _figure(distribution.percentile(percent).value * _MS)


def _figure(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"


def sweep_verdict(sweep: Sweep) -> Verdict:
    """OK: a knee, or the highest rate was still good."""
    if sweep.found is Found.VOID:
        return Verdict.VOID
    return Verdict.OK if sweep.found in (Found.KNEE, Found.ABOVE_MAX) else Verdict.SHORT


def sweep_line(sweep: Sweep, label: str) -> str:
    """As `result_line`, of a sweep."""
    values = {"label": label.replace(" ", "_"), "found": sweep.found.value.replace(" ", "_"), "limits": str(sweep.search.limits).replace(" ", "_")}
    values |= {"knee_per_s": "-" if sweep.knee_per_s is None else f"{sweep.knee_per_s:.4g}"}
    values |= {"bad_per_s": "-" if sweep.bad_per_s is None else f"{sweep.bad_per_s:.4g}", "probes": str(len(sweep.probes))}
    return " ".join([sweep_verdict(sweep).name, "bench-sweep", *(f"{key}={value}" for key, value in values.items())])
