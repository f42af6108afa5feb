"""Every figure against a case worked out by hand, and against brute force."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from bench.cost import Price
from bench.goodput import Limits
from bench.metrics import Summary, summarize
from bench.percentiles import Distribution
from bench.record import Outcome, Record
from tests.bench.records import queue_records, record, run_of

_HAND = (
    # Due at 0, sent 0.1 late; tokens at 0.5, 0.7, 1.3 (two at once).
    record(0, due_s=0.0, sent_s=0.1, at_s=[0.5, 0.7, 1.3], tokens=[1, 1, 2], ended_s=1.4, num_prompt_tokens=100),
    record(1, due_s=1.0, at_s=[1.2], num_prompt_tokens=50),
    record(2, due_s=2.0, outcome=Outcome.REFUSED, ended_s=2.1, error="RESOURCE_EXHAUSTED queue full"),
    record(3, due_s=4.0, at_s=[5.0, 5.5], ended_s=9.0, outcome=Outcome.TIMEOUT, error="60 s"),
    record(4, due_s=0.0, at_s=[77.0], warm_up=True),
)


def _hand(*limits: Limits, price: Price | None = None) -> Summary:
    return summarize(run_of(_HAND), limits, price)


def test_ttft_counts_from_the_schedule_and_beside_it_from_the_sending() -> None:
    summary = _hand()
    assert summary.ttft.mean.value == pytest.approx((0.5 + 0.2) / 2)
    assert summary.ttft_sent.mean.value == pytest.approx((0.4 + 0.2) / 2)


def test_e2e_ends_with_the_answer_and_not_with_its_last_token() -> None:
    summary = _hand()
    assert summary.e2e.max == pytest.approx(1.4)
    assert summary.e2e_sent.max == pytest.approx(1.3)


def test_itl_is_each_gap_between_messages_however_many_tokens_they_have() -> None:
    summary = _hand()
    assert summary.itl.num_values == 2
    assert summary.itl.mean.value == pytest.approx((0.2 + 0.6) / 2)
    assert summary.itl.max == pytest.approx(0.6)


def test_tpot_is_per_token_and_a_request_of_one_token_has_none() -> None:
    summary = _hand()
    assert summary.tpot.num_values == 1
    assert summary.tpot.mean.value == pytest.approx((1.3 - 0.5) / 3)


def test_tokens_per_message_stands_beside_itl() -> None:
    assert _hand().tokens_per_message.mean.value == pytest.approx((1 + 1 + 2 + 1) / 4)


def test_a_server_that_groups_tokens_does_not_look_faster_by_its_gaps() -> None:
    single = summarize(run_of([record(0, at_s=[0.1 * (n + 1) for n in range(20)])]))
    grouped = summarize(run_of([record(0, at_s=[0.1, *(0.1 + 0.5 * (n + 1) for n in range(4))], tokens=[1, 5, 5, 5, 4])]))
    assert grouped.itl.percentile(50).value == pytest.approx(5 * single.itl.percentile(50).value)
    assert grouped.tokens_per_message.mean.value == pytest.approx(4)


def test_requests_that_did_not_end_well_are_counted_with_their_reasons() -> None:
    counts = _hand().counts
    assert (counts.num_requests, counts.num_warm_up, counts.num_missed) == (4, 1, 2)
    assert (counts.of(Outcome.OK), counts.of(Outcome.REFUSED), counts.of(Outcome.TIMEOUT), counts.of(Outcome.WRONG)) == (2, 1, 1, 0)
    assert set(counts.reasons) == {(Outcome.REFUSED, "RESOURCE_EXHAUSTED queue full", 1), (Outcome.TIMEOUT, "60 s", 1)}


def test_a_percentile_says_how_many_of_the_requests_are_in_it() -> None:
    summary = _hand()
    assert (summary.ttft.num_requests, summary.ttft.num_all) == (2, 4)
    assert (summary.itl.num_requests, summary.itl.num_all) == (1, 4)


def test_a_percentile_of_all_is_infinite_where_it_falls_among_those_that_failed() -> None:
    well = [record(index, due_s=index, at_s=[index + 0.1]) for index in range(70)]
    refused = [record(70 + index, due_s=70 + index, outcome=Outcome.REFUSED) for index in range(30)]
    ttft = summarize(run_of(well + refused)).ttft
    assert ttft.percentile(90).value == pytest.approx(0.1)
    assert dict(ttft.of_all)[50] == pytest.approx(0.1)
    assert dict(ttft.of_all)[90] == math.inf


def test_goodput_and_attainment_count_misses_among_all() -> None:
    loose, tight, none = _hand(Limits(e2e_s=10), Limits(ttft_s=0.3), Limits()).goodput
    assert [loose.num_good, tight.num_good, none.num_good] == [2, 1, 2]
    assert [loose.attainment.value, tight.attainment.value] == [0.5, 0.25]
    # From the first request's time, 0, to the end of the last one, 9.
    assert loose.per_s.value == pytest.approx(2 / 9)


def test_a_limit_counts_from_the_schedule() -> None:
    late = [record(0, due_s=0.0, sent_s=3.0, at_s=[3.1])]
    assert summarize(run_of(late), [Limits(ttft_s=0.2)]).goodput[0].num_good == 0


def test_all_limits_of_a_set_must_be_kept() -> None:
    at = record(0, at_s=[0.5, 0.6, 0.7])
    cases = {Limits(0.5, 0.1, 0.7): 1, Limits(0.49, 0.1, 0.7): 0, Limits(0.5, 0.09, 0.7): 0, Limits(0.5, 0.1, 0.69): 0}
    found = summarize(run_of([at]), [dataclasses.replace(each, tpot_s=(each.tpot_s or 0) + 1e-9) for each in cases]).goodput
    assert [each.num_good for each in found] == list(cases.values())


def test_a_request_of_one_token_keeps_any_tpot_limit() -> None:
    assert summarize(run_of([record(0, at_s=[0.5])]), [Limits(tpot_s=0.001)]).goodput[0].num_good == 1


def test_rates_over_the_whole_run_count_what_ended_well() -> None:
    rates = _hand().throughput
    assert rates.whole.requests_per_s == pytest.approx(2 / 9)
    assert rates.whole.prompt_tokens_per_s == pytest.approx(150 / 9)
    assert rates.whole.output_tokens_per_s == pytest.approx(5 / 9)
    assert rates.asked_per_s == pytest.approx(3 / 4)


def test_the_steady_rate_leaves_out_ramp_and_drain() -> None:
    # One request a second for 100 s, each of 20 s and 20 tokens: 20 tokens a second once as many are out as will be.
    records = [record(index, due_s=index, at_s=[index + 1 + n for n in range(20)]) for index in range(101)]
    rates = summarize(run_of(records)).throughput
    assert rates.steady.start_s == pytest.approx(20)
    assert rates.steady.end_s == 100
    assert rates.steady.output_tokens_per_s == pytest.approx(20, rel=0.02)
    assert rates.whole.output_tokens_per_s == pytest.approx(2020 / 120)


def test_usage_stands_where_messages_count_otherwise() -> None:
    one = dataclasses.replace(record(0, at_s=[1.0, 2.0]), num_output_tokens=9, counted_by="usage")
    summary = summarize(run_of([one]))
    assert summary.tpot.mean.value == pytest.approx(1 / 8)
    assert summary.throughput.whole.output_tokens_per_s == pytest.approx(9 / 2)


def test_cost_is_the_price_of_the_devices_over_the_rate_of_tokens() -> None:
    records = [record(index, due_s=index, at_s=[index + 0.5] * 10, num_prompt_tokens=90) for index in range(3601)]
    # 10 output and 100 tokens in all a second: 36 000 and 360 000 an hour, for 2 x 1.80.
    found = summarize(run_of(records), price=Price(1.8, 2)).cost
    assert found is not None
    assert found.per_million_output == pytest.approx(100, rel=1e-3)
    assert found.per_million_total == pytest.approx(10, rel=1e-3)


def test_tokens_that_never_came_cost_without_end() -> None:
    found = summarize(run_of([record(0, outcome=Outcome.FAILED)]), price=Price(1)).cost
    assert found is not None
    assert found.per_million_output == math.inf


def test_a_run_in_which_everything_failed_has_figures_that_are_nan() -> None:
    summary = summarize(run_of([record(index, due_s=index, outcome=Outcome.FAILED, error="boom") for index in range(20)]), [Limits(ttft_s=1)], Price(1))
    assert all(math.isnan(each.mean.value) and math.isnan(each.max) for each in summary.latencies)
    assert dict(summary.e2e.of_all)[50] == math.inf
    assert summary.goodput[0].attainment.value == 0


def test_a_run_with_nothing_but_its_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to make a figure of"):
        summarize(run_of([record(0, at_s=[1.0], warm_up=True)]))


def test_the_order_of_the_records_changes_nothing() -> None:
    records = _random_records(200)
    shuffled = list(records)
    np.random.default_rng(3).shuffle(shuffled)
    assert summarize(run_of(records), [Limits(ttft_s=0.2)]).to_json() == summarize(run_of(shuffled), [Limits(ttft_s=0.2)]).to_json()


def test_a_summary_goes_into_json() -> None:
    assert json.loads(json.dumps(_hand(Limits(ttft_s=1), price=Price(1)).to_json()))["ttft"]["num_requests"] == 2


def _random_records(num_requests: int) -> list[Record]:
    rng = np.random.default_rng(11)
    records = []
    for index in range(num_requests):
        due = float(rng.uniform(0, 60))
        sent = due + float(rng.exponential(0.01))
        at = sent + np.cumsum(rng.gamma(2, 0.02, int(rng.integers(1, 30))))
        tokens = [int(each) for each in rng.integers(1, 4, len(at))]
        outcome = Outcome.OK if rng.random() < 0.8 else Outcome.FAILED
        records.append(record(index, due_s=due, sent_s=sent, at_s=at.tolist(), tokens=tokens, outcome=outcome, num_prompt_tokens=int(rng.integers(1, 500))))
    return records


def test_figures_are_those_of_brute_force() -> None:
    records = _random_records(300)
    summary = summarize(run_of(records), [Limits(ttft_s=0.05, tpot_s=0.02)])
    well = [each for each in records if each.outcome is Outcome.OK]
    ttft = [each.arrived[0].at_s - each.due_s for each in well if each.due_s is not None]
    tpot = [(each.arrived[-1].at_s - each.arrived[0].at_s) / (each.num_output_tokens - 1) for each in well if each.num_output_tokens > 1]
    itl = [later.at_s - earlier.at_s for each in well for earlier, later in zip(each.arrived, each.arrived[1:], strict=False)]
    e2e = [each.ended_s - each.due_s for each in well if each.due_s is not None]
    for found, values in ((summary.ttft, ttft), (summary.tpot, tpot), (summary.itl, itl), (summary.e2e, e2e)):
        _assert_same(found, values)
    kept = sum(_keeps(each, 0.05, 0.02) for each in well)
    assert summary.goodput[0].num_good == kept


def _keeps(each: Record, ttft_s: float, tpot_s: float) -> bool:
    gaps = (each.arrived[-1].at_s - each.arrived[0].at_s) / max(each.num_output_tokens - 1, 1)
    return each.arrived[0].at_s - each.scheduled_s <= ttft_s and gaps <= tpot_s


def _assert_same(found: Distribution, values: list[float]) -> None:
    assert found.num_values == len(values)
    assert found.mean.value == pytest.approx(np.mean(values))
    assert found.max == pytest.approx(max(values))
    for percent, figure in found.percentiles:
        assert figure.value == pytest.approx(float(np.percentile(values, percent)))


def test_percentiles_are_within_two_percent_of_those_that_the_records_were_drawn_from() -> None:
    rng = np.random.default_rng(4)
    ttft, gap = rng.uniform(0.1, 0.5, 20_000), rng.uniform(0.01, 0.05, (20_000, 10))
    at = ttft[:, None] + np.cumsum(np.column_stack([np.zeros(len(ttft)), gap]), axis=1)
    summary = summarize(run_of([record(index, due_s=index / 100, at_s=(index / 100 + row).tolist()) for index, row in enumerate(at)]))
    for percent in (50, 90, 95, 99):
        assert summary.ttft.percentile(percent).value == pytest.approx(0.1 + 0.4 * percent / 100, rel=0.02, abs=0.001)
        assert summary.itl.percentile(percent).value == pytest.approx(0.01 + 0.04 * percent / 100, rel=0.02, abs=0.001)


def test_a_stall_shows_in_all_requests_that_were_due_meanwhile() -> None:
    """Coordinated omission: a generator that waits for the server sends them late, and from the sending each was quick."""
    records = []
    for index in range(200):
        due = index / 10
        sent = max(due, 10.0) if due >= 5 else due  # nothing moves from 5 s to 10 s
        records.append(record(index, due_s=due, sent_s=sent, at_s=[sent + 0.05]))
    summary = summarize(run_of(records), [Limits(ttft_s=0.5)])
    assert summary.ttft_sent.percentile(99).value == pytest.approx(0.05)
    assert summary.ttft.percentile(90).value > 2
    assert summary.ttft.max == pytest.approx(5.05)
    assert summary.goodput[0].attainment.value == pytest.approx(1 - 46 / 200, abs=0.01)


def test_a_closed_loop_counts_from_the_sending() -> None:
    summary = summarize(run_of([record(0, due_s=None, sent_s=2.0, at_s=[2.5])]))
    assert summary.ttft.max == summary.ttft_sent.max == pytest.approx(0.5)


def test_the_same_run_gives_the_same_figures() -> None:
    run = run_of(queue_records(0.8, 300, np.random.default_rng(0)))
    assert json.dumps(summarize(run).to_json()) == json.dumps(summarize(run).to_json())
