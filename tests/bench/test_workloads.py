"""Workloads keep what belongs together, and a plan is what its seed says."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, islice, takewhile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.arrivals import Closed, Poisson, TraceTimes, at_rate
from bench.plan import Loop, Plan
from bench.plan_statistics import dispersion, shared_token_ratio, statistics_of
from bench.prompts import Vocabulary
from bench.schedule import Extent, Fit, plan_of
from bench.trace_files import Row, Trace
from bench.workloads import NAMES, TraceWorkload, WorkloadError, workload_of

FIT = Fit(Vocabulary(5000, frozenset({300, 301})), max_model_len=8192)


def _random() -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(3))


def _plan(name: str = "azure-conv", seed: int = 0, num_requests: int = 50, scale: float = 0.1, num_warm_up: int = 5) -> Plan:
    return plan_of(workload_of(name), at_rate(5.0), Extent(num_requests, num_warm_up=num_warm_up), Fit(FIT.vocabulary, scale, 8192), seed)


def _digest(plan: Plan) -> str:
    rows = [(request.index, list(request.prompt_token_ids), request.max_tokens, request.due_s, request.warm_up) for request in plan.requests]
    return hashlib.sha256(repr((rows, plan.workload, plan.arrivals, plan.loop)).encode()).hexdigest()


SAMPLES = {
    "azure-conv": (1000, 1014.189, 247.262),
    "azure-code": (1000, 2122.354, 27.621),
    "mooncake": (500, 14249.71, 361.884),
    "arxiv": (500, 2542.378, 297.936),
}
"""Rows, and mean tokens of prompt and output, counted by other means."""


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_the_rows_that_their_notes_name(name: str) -> None:
    workload = workload_of(name)
    assert isinstance(workload, TraceWorkload)
    num_rows, mean_prompt, mean_output = SAMPLES[name]
    rows = workload.trace.rows
    assert len(rows) == num_rows
    assert np.mean([row.prompt_tokens for row in rows]) == pytest.approx(mean_prompt, rel=1e-3)
    assert np.mean([row.output_tokens for row in rows]) == pytest.approx(mean_output, rel=1e-3)


def test_samples_are_the_files_that_their_notes_tell_of() -> None:
    folder = Path(__file__).parents[2] / "bench" / "samples"
    told = re.findall(r"^\| `(\S+)` \| ([\d,]+) of .* \| `([0-9a-f]{16})` \|$", (folder / "README.md").read_text(), re.MULTILINE)
    found = []
    for path in sorted(each for each in folder.iterdir() if each.name != "README.md"):
        text = path.read_bytes()
        num_rows = text.count(b"\n") - (path.suffix == ".csv")
        found.append((path.name, f"{num_rows:,}", hashlib.sha256(text).hexdigest()[:16]))
    assert sorted(told) == found


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_makes_one_plan_and_another_seed_another(name: str) -> None:
    assert _digest(_plan(name, 1)) == _digest(_plan(name, 1)) != _digest(_plan(name, 2))


def test_a_plan_is_the_same_whatever_the_interpreter_hashes_by() -> None:
    code = "from tests.bench.test_workloads import _digest, _plan; print(_digest(_plan('mooncake', 7)))"
    code = code.replace("from tests.bench.test_workloads", "import sys; sys.path.insert(0, 'tests/bench'); from test_workloads")
    found = {subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout for seed in "12"}
    assert found == {_digest(_plan("mooncake", 7)) + "\n"}


def test_lengths_of_a_row_stay_together() -> None:
    workload = workload_of("azure-conv")
    assert isinstance(workload, TraceWorkload)
    pairs = {(row.prompt_tokens, row.output_tokens) for row in workload.trace.rows}
    plan = plan_of(workload, at_rate(5.0), Extent(200), FIT, 3)
    assert {(len(request.prompt_token_ids), request.max_tokens) for request in plan.requests} <= pairs


def test_a_trace_is_replayed_at_its_own_times_from_its_first_row() -> None:
    workload = workload_of("azure-code")
    assert isinstance(workload, TraceWorkload)
    plan = plan_of(workload, TraceTimes(2.0), Extent(100, num_warm_up=10), FIT, 5)
    kept = [row for row in workload.trace.rows[:110] if row.prompt_tokens + row.output_tokens <= 8192]
    assert [request.due_s for request in plan.requests] == [(row.at_s or 0.0) / 2 for row in kept]
    assert [len(request.prompt_token_ids) for request in plan.requests] == [row.prompt_tokens for row in kept]


def test_a_replay_ends_with_its_trace() -> None:
    assert len(plan_of(workload_of("azure-code"), TraceTimes(), Extent(5000), Fit(FIT.vocabulary)).requests) == 1000


_GAPPED = TraceWorkload("t", Trace(tuple(Row(500 if place in (1, 5) else 10 + place, 1, float(place)) for place in range(6))))
"""Of its rows, 1 and 5 are too long."""
_SHORT = Fit(FIT.vocabulary, 1.0, 100)


def _sent(plan: Plan) -> list[tuple[float | None, int]]:
    return [(request.due_s, len(request.prompt_token_ids)) for request in plan.requests]


def test_a_replay_whose_last_row_is_left_out_begins_no_second_lap() -> None:
    plan = plan_of(_GAPPED, TraceTimes(), Extent(6), _SHORT)
    assert _sent(plan) == [(0.0, 10), (2.0, 12), (3.0, 13), (4.0, 14)]
    assert plan.workload == "t (2 rows longer than 100 tokens left out)"


def test_a_replay_sends_as_many_as_were_asked_for_beside_those_left_out() -> None:
    plan = plan_of(_GAPPED, TraceTimes(2.0), Extent(2, num_warm_up=1), _SHORT)
    assert _sent(plan) == [(0.0, 10), (1.0, 12), (1.5, 13)]
    assert plan.workload == "t (1 row longer than 100 tokens left out)"


def test_rows_behind_the_end_of_a_replay_are_not_told_as_left_out() -> None:
    assert plan_of(_GAPPED, TraceTimes(), Extent(duration_s=1.0), _SHORT).workload == "t"
    plan = plan_of(_GAPPED, TraceTimes(), Extent(duration_s=2.0, num_warm_up=1), _SHORT)
    assert _sent(plan) == [(0.0, 10), (2.0, 12), (3.0, 13)]


def test_a_scale_that_blocks_cannot_keep_is_told() -> None:
    mooncake = workload_of("mooncake")
    exact, rounded = (plan_of(mooncake, Closed(1), Extent(5), Fit(FIT.vocabulary, scale)) for scale in (1 / 16, 0.001))
    assert exact.workload == "mooncake"
    assert rounded.workload == "mooncake (prompts x0.001953, in whole blocks of 1)"


def test_failed_requests_of_a_trace_are_told(tmp_path: Path) -> None:
    path = tmp_path / "slice.csv"
    path.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,A,10,18,28,API log\n6,A,0,0,0,API log\n")
    assert plan_of(workload_of(f"burstgpt:{path}"), TraceTimes(), Extent(1), FIT).workload == "burstgpt:slice.csv (without 1 that had failed)"


def test_prompts_that_no_memory_holds_are_refused_before_one_is_drawn() -> None:
    with pytest.raises(WorkloadError, match="a plan at most 500000000: give a smaller scale"):
        plan_of(workload_of("fixed", input_len="5000"), Closed(1), Extent(200_000), FIT)


def test_mooncake_prompts_begin_alike_exactly_as_their_blocks_do() -> None:
    workload = workload_of("mooncake")
    assert isinstance(workload, TraceWorkload)
    scale = 32 / 512
    plan = plan_of(workload, TraceTimes(), Extent(60), Fit(FIT.vocabulary, scale), 1)
    rows = list(islice(workload.rows(np.random.Generator(np.random.PCG64(np.random.SeedSequence((1, 2)))), from_start=True), 60))
    for (one, one_row), (other, other_row) in combinations(zip(plan.requests, rows, strict=True), 2):
        num_alike = _num_alike(one.prompt_token_ids, other.prompt_token_ids)
        num_blocks = _num_alike(one_row.hash_ids, other_row.hash_ids)
        shorter = min(len(one.prompt_token_ids), len(other.prompt_token_ids))
        assert min(num_blocks * 32, shorter) <= num_alike < num_blocks * 32 + 8


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_mooncake_times_are_spread_within_their_buckets_unless_taken_literally() -> None:
    spread, literal = workload_of("mooncake"), workload_of("mooncake", literal=True)
    assert isinstance(spread, TraceWorkload)
    rows = list(islice(spread.rows(_random(), from_start=True), 500))
    times = [row.at_s or 0.0 for row in rows]
    assert times == sorted(times)

    def at(row: Row) -> tuple[object, ...]:
        return row.prompt_tokens, row.output_tokens, row.hash_ids

    for row, bucket in zip(sorted(rows, key=at), sorted(spread.trace.rows, key=at), strict=True):
        assert (bucket.at_s or 0.0) <= (row.at_s or 0.0) < (bucket.at_s or 0.0) + 3.0
    assert len(set(times)) == 500
    assert [row.at_s for row in islice(literal.rows(_random(), from_start=True), 500)] == [row.at_s for row in spread.trace.rows]
    assert "literal" in literal.name
    assert "literal" not in spread.name


def test_a_second_lap_of_a_trace_shares_no_prefix_with_the_first() -> None:
    workload = TraceWorkload("t", Trace((Row(600, 1, 0.0, (0, 1)), Row(600, 1, 1.0, (0, 2)))), 512)
    laps = [row.hash_ids for row in islice(workload.rows(_random(), from_start=True), 4)]
    assert laps == [(0, 1), (0, 2), (3, 4), (3, 5)]


@pytest.mark.parametrize("name", ["azure-conv", "fixed", "uniform"])
def test_prompts_that_share_nothing_begin_with_other_tokens(name: str) -> None:
    assert shared_token_ratio(_plan(name, num_requests=300).requests) == 0.0


def test_groups_share_half_of_their_prompts() -> None:
    plan = plan_of(workload_of("shared-prefix", input_len="512"), Closed(4), Extent(400), FIT)
    # The first of each of the 8 groups shares nothing.
    assert shared_token_ratio(plan.requests) == pytest.approx(0.5 * 392 / 400)


def test_prompts_avoid_special_tokens() -> None:
    ids = {each for request in _plan("uniform", num_requests=400, scale=1.0).requests for each in request.prompt_token_ids}
    assert not ids & {300, 301}
    assert min(ids) >= 256
    assert max(ids) < 5000
    assert len(ids) > 4000


@settings(max_examples=40, deadline=None)
@given(scale=st.floats(0.001, 3.0), seed=st.integers(0, 5))
def test_a_scale_multiplies_every_length_and_leaves_at_least_one_token(scale: float, seed: int) -> None:
    workload = workload_of("azure-conv")
    plain = plan_of(workload, Closed(2), Extent(20), Fit(FIT.vocabulary), seed)
    scaled = plan_of(workload, Closed(2), Extent(20), Fit(FIT.vocabulary, scale), seed)
    for one, other in zip(plain.requests, scaled.requests, strict=True):
        assert len(other.prompt_token_ids) == max(round(len(one.prompt_token_ids) * scale), 1)
        assert other.max_tokens == max(round(one.max_tokens * scale), 1)


def test_rows_that_the_model_cannot_take_are_left_out_and_counted() -> None:
    plan = plan_of(workload_of("azure-code"), Closed(2), Extent(300), Fit(FIT.vocabulary, 1.0, 2000), 0)
    assert len(plan.requests) == 300
    assert max(len(request.prompt_token_ids) + request.max_tokens for request in plan.requests) <= 2000
    assert "rows longer than 2000 tokens left out" in plan.workload


def test_a_duration_counts_behind_the_warm_up() -> None:
    plan = plan_of(workload_of("fixed"), Poisson(20.0), Extent(duration_s=10.0, num_warm_up=40), FIT)
    counted = [request.due_s or 0.0 for request in plan.requests if not request.warm_up]
    assert sum(request.warm_up for request in plan.requests) == 40
    assert 9.0 < counted[-1] - counted[0] < 10.0
    assert 150 < len(counted) < 250


def test_a_closed_loop_has_no_times() -> None:
    plan = plan_of(workload_of("fixed"), Closed(3), Extent(10), FIT)
    assert (plan.loop, plan.concurrency, {request.due_s for request in plan.requests}) == (Loop.CLOSED, 3, {None})


REFUSED = {
    "unknown": ("azur", {}, Poisson(1.0), Extent(1), FIT, "there is no workload 'azur': give one of azure-conv"),
    "lengths of a trace": ("azure-conv", {"input_len": "5"}, Poisson(1.0), Extent(1), FIT, "its trace's own"),
    "no range": ("uniform", {"input_len": "5:x"}, Poisson(1.0), Extent(1), FIT, "input-len: '5:x'"),
    "a range from behind": ("uniform", {"output_len": "5:4"}, Poisson(1.0), Extent(1), FIT, "output-len: '5:4'"),
    "a range that is fixed": ("fixed", {"output_len": "4:5"}, Poisson(1.0), Extent(1), FIT, "fixed has one length"),
    "literal azure": ("azure-conv", {"literal": True}, Poisson(1.0), Extent(1), FIT, "literal as they are"),
    "no times": ("arxiv", {}, TraceTimes(), Extent(1), FIT, "no times of its own"),
    "no end": ("fixed", {}, Closed(1), Extent(duration_s=3.0), FIT, "number of requests"),
    "no scale": ("fixed", {}, Closed(1), Extent(1), Fit(FIT.vocabulary, 0.0), "scale must be above 0"),
    "too large": ("fixed", {}, Closed(1), Extent(2_000_000), FIT, "at most 1000000 requests"),
    "nothing fits": ("fixed", {}, Closed(1), Extent(1), Fit(FIT.vocabulary, 1.0, 100), "give a smaller scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_in_words(name: str) -> None:
    workload, options, arrivals, extent, fit, expected = REFUSED[name]
    with pytest.raises(WorkloadError, match=expected):
        plan_of(workload_of(workload, **options), arrivals, extent, fit)  # type: ignore[arg-type]


def test_statistics_of_a_plan_that_was_counted_by_hand() -> None:
    times = np.array([0.0, 0.1, 0.2, 1.5, 2.5, 3.0])
    assert dispersion(times, 1.0) == pytest.approx((2 * 4 + 2 * 1) / 9 / (5 / 3), rel=0.2)
    assert dispersion(times, 2.0) is None
    statistics = statistics_of(_plan(num_requests=400, num_warm_up=10))
    assert statistics.num_requests == 400
    assert statistics.rate_per_s == pytest.approx(5.0, rel=0.15)
    assert statistics.gap_cv == pytest.approx(1.0, abs=0.12)
    assert statistics.dispersion_1s == pytest.approx(1.0, abs=0.35)


def test_bursts_of_a_trace_show_in_its_statistics() -> None:
    statistics = statistics_of(plan_of(workload_of("azure-code"), TraceTimes(), Extent(1000), Fit(FIT.vocabulary)))
    assert (statistics.gap_cv or 0.0) > 5.0
    assert (statistics.dispersion_10s or 0.0) > 20.0


def test_statistics_are_told_in_four_digits_and_without_those_that_there_are_none_of() -> None:
    fixed = workload_of("fixed", input_len="96", output_len="7")
    told = statistics_of(plan_of(fixed, Closed(3), Extent(3), FIT)).to_json()
    assert told == {
        "num_requests": 3,
        "prompt_tokens": dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 96.0),
        "output_tokens": dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 7.0),
        "shared_token_ratio": 0.0,
    }
    constant = statistics_of(plan_of(fixed, at_rate(4.0, float("inf")), Extent(90), FIT)).to_json()
    assert {name: constant[name] for name in ("rate_per_s", "gap_cv", "dispersion_10s")} == {"rate_per_s": 4.0, "gap_cv": 0.0, "dispersion_10s": 0.0}


def test_an_endless_cache_has_of_mooncake_what_its_blocks_say() -> None:
    workload = workload_of("mooncake", literal=True)
    assert isinstance(workload, TraceWorkload)
    seen: set[int] = set()
    num_shared = num_tokens = 0
    for row in workload.trace.rows:
        num_blocks = sum(1 for _ in takewhile(seen.__contains__, row.hash_ids))
        num_shared += min(num_blocks * 512, row.prompt_tokens)
        num_tokens += row.prompt_tokens
        seen.update(row.hash_ids)
    plan = plan_of(workload, TraceTimes(), Extent(500), Fit(FIT.vocabulary, 1 / 32))
    assert statistics_of(plan).shared_token_ratio == pytest.approx(num_shared / num_tokens, abs=0.005)
    assert num_shared / num_tokens > 0.1
