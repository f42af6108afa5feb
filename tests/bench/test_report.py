"""The page stands alone, says everything that was measured, and takes nothing from outside as markup."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import quantity
from bench.charts import swatch
from bench.cost import Price
from bench.goodput import Limits
from bench.metrics import summarize
from bench.percentiles import Distribution
from bench.record import Arrived, Outcome, Record
from bench.report import report, write_report
from bench.run import Run, Sample
from bench.sweep import Found, Search, Sweep, find_knee
from tests.bench.records import queue_records, record, run_of

_VOID_TAGS = {"meta", "link"}
_HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)>" onload="alert(3) \' & </style></title>'


class _Page(HTMLParser):
    """Checks that tags close in order, and keeps tags, their attributes and the text that a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID_TAGS:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text.append(data)

    @property
    def seen(self) -> str:
        return "\n".join(self.text)


def _run(label: str = "a", *, seed: int = 0, num_requests: int = 120, void: tuple[str, ...] = (), error: str = "UNAVAILABLE gone", **plan: Any) -> Run:
    rng = np.random.default_rng(seed)
    records: list[Record] = []
    for each in queue_records(0.8, num_requests, rng, service_s=0.2):
        at = each.arrived[0].at_s + np.cumsum(rng.gamma(3, 0.01, 12))
        miss = rng.random() < 0.1
        records.append(
            dataclasses.replace(
                each,
                arrived=() if miss else (*each.arrived, *(Arrived(float(one), 1) for one in at)),
                num_output_tokens=0 if miss else 13,
                ended_s=float(at[-1]) + 0.01,
                outcome=Outcome.REFUSED if miss else Outcome.OK,
                error=error if miss else "",
                warm_up=each.index < 5,
            )
        )
    samples = tuple(Sample(float(at), at % 7, at % 3, 0.1 * (at % 10)) for at in range(0, 100, 2))
    run = dataclasses.replace(run_of(records, label=label, void=void), samples=samples, cold_start={"ttft_s": 1.5})
    return dataclasses.replace(run, plan={**run.plan, **plan}, environment={"cpu": "a cpu", "packages": {"numpy": "2"}})


def _sweep() -> Sweep:
    rng = np.random.default_rng(0)

    async def load(rate: float) -> Run:
        return run_of(queue_records(rate, 200, rng), label=f"{rate:g}/s")

    return asyncio.run(find_knee(load, Search(Limits(e2e_s=4), start_per_s=0.3)))


_LIMITS = (Limits(0.5, 0.05), Limits(e2e_s=2.0))
_PRICE = Price(2.5, 4, "EUR")


def test_one_run_several_and_a_sweep_are_well_formed_and_load_nothing() -> None:
    pages = [
        report([_run()], limits=_LIMITS, price=_PRICE),
        report([_run("a"), _run("b", seed=1), _run("c", seed=2, void=("lag",))], limits=_LIMITS),
        report([], _sweep(), price=_PRICE),
        report([_run()], _sweep()),
    ]
    for page in pages:
        parsed = _Page(page)
        assert not {"script", "iframe", "img", "object", "embed"} & {tag for tag, _ in parsed.tags}
        for _, attributes in parsed.tags:
            assert not any(name.startswith("on") for name in attributes)
            for name in ("src", "href", "xlink:href", "action", "data"):
                assert (attributes.get(name) or "data:").startswith("data:")
        assert not re.search(r"url\(|@import|https?://", page)


def test_a_browser_is_told_to_load_and_run_nothing() -> None:
    metas = [attributes for tag, attributes in _Page(report([_run()])).tags if tag == "meta"]
    policy = next(each["content"] for each in metas if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "script" not in policy


def test_hostile_text_stays_text_wherever_it_comes_from() -> None:
    run = _run(_HOSTILE, error=_HOSTILE, void=(_HOSTILE,), workload=_HOSTILE, arrivals=_HOSTILE, odd=_HOSTILE)
    run = dataclasses.replace(run, target=_HOSTILE, environment={_HOSTILE: {_HOSTILE: [_HOSTILE]}})
    other = dataclasses.replace(run, label=_HOSTILE, void=())
    page = report([run, other], limits=_LIMITS, price=Price(1, 1, _HOSTILE), title=_HOSTILE)
    parsed = _Page(page)
    assert not {"script", "img"} & {tag for tag, _ in parsed.tags}
    assert not any("onload" in attributes or "onerror" in attributes for _, attributes in parsed.tags)
    assert _HOSTILE in parsed.seen
    assert sum(tag == "style" for tag, _ in parsed.tags) == 1


def _figures_of(one: Distribution) -> list[str]:
    largest = one.percentile(99).value
    _, factor = quantity.unit_for(largest)
    found = []
    for figure in (one.mean, *(each for _, each in one.percentiles)):
        found.append(quantity.number(figure.value * factor))
        if figure.interval is not None:
            found.append(f"{quantity.number(figure.interval.low * factor)} to {quantity.number(figure.interval.high * factor)}")
    return [*found, quantity.number(one.max * factor), f"{one.num_requests} of {one.num_all}"]


def test_every_figure_is_on_the_page() -> None:
    run = _run()
    summary = summarize(run, _LIMITS, _PRICE)
    seen = _Page(report([run], limits=_LIMITS, price=_PRICE)).seen
    expected = [text for one in (*summary.latencies, summary.ttft_sent, summary.e2e_sent) for text in _figures_of(one)]
    for each in summary.goodput:
        expected += [str(each.limits), quantity.number(each.per_s.value), quantity.share(each.attainment.value), f"{each.num_good} of {each.num_requests}"]
    for rates in (summary.throughput.steady, summary.throughput.whole):
        expected += [quantity.number(value) for value in (rates.requests_per_s, rates.prompt_tokens_per_s, rates.output_tokens_per_s, rates.total_tokens_per_s)]
    assert summary.cost is not None
    expected += [quantity.number(summary.cost.per_million_output), quantity.number(summary.cost.per_million_total), "EUR"]
    expected += [quantity.number(summary.tokens_per_message.mean.value), str(summary.counts.of(Outcome.REFUSED)), "UNAVAILABLE gone", "a cpu"]
    expected += [quantity.seconds(run.generator.send_lag_p99_s), quantity.share(run.generator.cpu), quantity.seconds(1.5)]
    assert [text for text in expected if text not in seen] == []


def test_refusals_show_beside_percentiles_and_in_percentiles_of_all() -> None:
    well = [record(index, due_s=index, at_s=[index + 0.1]) for index in range(70)]
    refused = [record(70 + index, due_s=70 + index, outcome=Outcome.REFUSED) for index in range(30)]
    seen = _Page(report([run_of(well + refused)])).seen
    assert "70 of 100" in seen and "70.0 %" in seen and quantity.NEVER in seen


@pytest.mark.parametrize(("loop", "due"), [("open", 0.0), ("closed", None)])
def test_the_loop_is_always_stated(loop: str, due: float | None) -> None:
    run = run_of([record(index, due_s=due if due is None else index, sent_s=float(index), at_s=[index + 0.5]) for index in range(10)])
    seen = _Page(report([dataclasses.replace(run, plan={"loop": loop})])).seen
    assert f"Loop: \n{loop}" in seen and f"{loop}: " in seen


def test_a_void_run_says_so_first_with_its_reasons_and_is_compared_with_nothing() -> None:
    page = report([_run("a"), _run("b", void=("send lag p99 40 ms is above 5 ms", "CPU 98 %"))], limits=_LIMITS)
    seen = _Page(page).seen
    head = seen[: seen.index("In short")]
    assert "VOID" in head and "send lag p99 40 ms is above 5 ms" in head and "CPU 98 %" in head
    compared = seen[seen.index("Compared with") : seen.index("What was asked")]
    assert "×" not in compared and "void" in compared
    assert "VALID" not in _Page(report([_run(void=("lag",))])).seen


def test_every_chart_says_in_words_what_it_shows() -> None:
    page = report([_run("first"), _run("second", seed=1)], limits=_LIMITS)
    charts = [attributes for tag, attributes in _Page(page).tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(charts) >= 15
    assert all(len(attributes.get("aria-label") or "") > 25 for attributes in charts)


def test_numbers_of_a_chart_are_numbers() -> None:
    for page in (report([_run()], limits=_LIMITS), report([], _sweep()), report([run_of([record(0, at_s=[0.5])])])):
        assert not re.search(r'="[^"]*(nan|inf)[^"]*"', re.sub(r'aria-label="[^"]*"', "", page))


def test_a_run_has_the_same_colour_in_every_chart() -> None:
    page = report([_run("first"), _run("second", seed=1)], limits=_LIMITS)
    styles = {name: set(re.findall(rf'<g class="(\w+)"><title>{name}</title>', page)) for name in ("first", "second")}
    assert styles == {"first": {"s0"}, "second": {"s1"}}


def test_runs_of_one_label_are_told_apart() -> None:
    seen = _Page(report([_run("same"), _run("same", seed=1)])).seen
    assert "same (1)" in seen and "same (2)" in seen


def test_a_sweep_shows_its_knee_and_all_probes() -> None:
    sweep = _sweep()
    seen = _Page(report([], sweep)).seen
    assert sweep.found is Found.KNEE and sweep.knee_per_s is not None
    assert f"{quantity.number(sweep.knee_per_s)} requests/s" in seen and "KNEE" in seen
    assert f"All {len(sweep.probes)} probes" in seen
    assert all(probe.reason in seen for probe in sweep.probes)


def test_a_void_sweep_says_so() -> None:
    async def load(rate: float) -> Run:
        return run_of(queue_records(rate, 20, np.random.default_rng(0)), void=("CPU 98 %",))

    seen = _Page(report([], asyncio.run(find_knee(load, Search(Limits(e2e_s=4)))))).seen
    assert "VOID" in seen and "CPU 98 %" in seen and "Every probe was void" in seen


def test_odd_runs_have_a_page_too() -> None:
    failed = run_of([record(index, due_s=index, outcome=Outcome.FAILED, error="boom") for index in range(30)], label="all failed")
    lonely = run_of([record(0, at_s=[0.5])], label="one request")
    at_once = run_of([record(index, due_s=0.0, at_s=[0.5]) for index in range(30)], label="all at once")
    blind = dataclasses.replace(_run("no KV usage"), samples=(Sample(0.0, 1, 0, None), Sample(1.0, 1, 0, None)))
    warm_up = run_of([record(0, at_s=[0.5], warm_up=True)], label="only warm-up")
    seen = _Page(report([failed, lonely, at_once, blind, warm_up], limits=_LIMITS, price=_PRICE)).seen
    for name in ("all failed", "one request", "all at once", "no KV usage", "only warm-up", "boom"):
        assert name in seen


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to report"):
        report([])


def test_the_file_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    path = write_report(tmp_path / "deep" / "r.html", [_run()], title="A title")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "<title>A title</title>" in path.read_text(encoding="utf-8")


def test_numbers_have_three_digits_that_count() -> None:
    told = {0.0: "0", 9.996: "10.0", 99.96: "100", 1234.4: "1\u202f234", 0.01234: "0.0123", 0.09996: "0.100", 1e6: "1\u202f000\u202f000"}
    assert {value: quantity.number(value) for value in told} == told
    assert [quantity.share(each) for each in (0.0, 1.0, 0.9966, 0.5, 0.0034)] == ["0 %", "100 %", "99.66 %", "50.0 %", "0.34 %"]
    assert [quantity.seconds(each) for each in (0.5, 0.0005, 12.0, 0.0)] == ["500 ms", "500 µs", "12.0 s", "0 ms"]


def test_many_runs_are_told_apart_by_colour_and_dash_together() -> None:
    swatches = [re.sub(r"aria-hidden.*?<path", "", swatch(style)) for style in range(12)]
    assert len(set(swatches)) == 12


def test_a_figure_is_marked_where_failures_are_missing_in_it_and_not_where_it_cannot_be() -> None:
    def marked(page: str) -> set[str]:
        return set(re.findall(r'class="[^"]*warn[^"]*"[^>]*>([^<]*)', page))

    answers = [record(index, due_s=index, at_s=(index + 0.1,) if index % 4 else (index + 0.1, index + 0.2)) for index in range(40)]
    assert not marked(report([run_of(answers)]))
    lost = [*answers, record(40, due_s=40.0, outcome=Outcome.REFUSED)]
    assert {"10 of 41", "40 of 41"} <= marked(report([run_of(lost)]))
