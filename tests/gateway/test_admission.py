from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission import Refused, Ticket
from gateway.instances import Role
from gateway.limits import AdmissionLimits
from gateway.router import Demand, Missing, Waiting
from tests.gateway.desk import Desk
from tests.gateway.fake_decode import load_report


def routed(ticket: Ticket) -> bool:
    return ticket.route is not None


def test_what_fits_is_admitted_at_once_with_both_instances() -> None:
    desk = Desk()
    ticket = desk.offer()
    assert ticket.route is not None
    assert (ticket.route.decode.name, ticket.route.computing.name) == ("d0", "p0")
    desk.admission.end(ticket)
    desk.admission.end(ticket)
    desk.admission.assert_nothing_held()


def test_without_a_prefill_pool_decode_computes() -> None:
    desk = Desk(num_prefills=0)
    ticket = desk.offer()
    assert ticket.route is not None
    assert ticket.route.prefill is None
    assert desk.instances["d0"].backlog.own == 16
    desk.admission.prompt_done(ticket)
    assert desk.instances["d0"].backlog.own == 0
    desk.admission.end(ticket)


def test_a_release_a_correction_and_a_report_wake_the_head() -> None:
    for wake in ("end", "reserved", "report"):
        desk = Desk(num_blocks=4, num_free_blocks=4)
        first = desk.offer(num_prompt=32, max_new=16)
        second = desk.offer(num_prompt=30, max_new=2)
        assert (second.route, second.waited_for) == (None, Waiting.KV_BLOCKS)
        if wake == "end":
            desk.admission.end(first)
        elif wake == "reserved":
            desk.admission.answered(first, 1)
        else:
            desk.report("d0", Role.DECODE, num_blocks=8, num_free_blocks=8)
        assert routed(second), wake


def test_nobody_overtakes_the_head_and_priority_comes_before_arrival() -> None:
    desk = Desk(num_blocks=4, num_free_blocks=4)
    running = desk.offer(num_prompt=32, max_new=16)
    large, small, urgent = desk.offer(num_prompt=32, max_new=32), desk.offer(num_prompt=14, max_new=2), desk.offer(num_prompt=14, max_new=2, priority=-1)
    assert routed(urgent), "smaller is first"
    assert not routed(large) and not routed(small), "one block is free, and the head needs four"
    desk.admission.end(urgent)
    assert not routed(small)
    desk.admission.end(running)
    assert routed(large)
    desk.admission.end(large)
    assert routed(small)


def test_a_request_that_comes_back_is_in_front_and_no_limit_refuses_it() -> None:
    desk = Desk(limits=AdmissionLimits(max_active_requests=1, max_queue_requests=1))
    first, second = desk.offer(), desk.offer()
    desk.admission.refused_by_decode(first)
    desk.admission.end(first)
    assert not routed(second), "the instance said no"
    again = desk.ticket(arrival=first.arrival)
    desk.admission.offer(again, again=True)
    assert not routed(again)
    desk.admission.retry("d0")
    assert routed(again)
    assert not routed(second)


def test_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    desk = Desk(limits=AdmissionLimits(max_active_requests=1, max_queue_requests=2, max_queue_tokens=100))
    desk.offer()
    desk.offer(num_prompt=50)
    with pytest.raises(Refused, match="QUEUE_FULL"):
        desk.offer(num_prompt=51)
    desk.offer(num_prompt=50)
    with pytest.raises(Refused, match="QUEUE_FULL"):
        desk.offer(num_prompt=1, priority=-5)
    assert desk.admission.num_waiting == 2


def test_what_can_never_fit_is_refused_at_once() -> None:
    for desk, fields in (
        (Desk(num_blocks=4, num_free_blocks=4), {"num_prompt": 63, "max_new": 2}),
        (Desk(max_model_len=100), {"num_prompt": 50, "max_new": 51}),
        (Desk(limits=AdmissionLimits(max_total_kv_tokens=40)), {"num_prompt": 25, "max_new": 16}),
    ):
        with pytest.raises(Refused, match="TOO_LONG"):
            desk.offer(**fields)
        desk.admission.assert_nothing_held()


def test_one_token_needs_no_blocks_of_decode_when_prefill_computes_it() -> None:
    for num_prefills, used in ((1, 0), (0, 5)):
        desk = Desk(num_prefills=num_prefills)
        desk.offer(num_prompt=65, max_new=1)
        assert desk.ledger.num_used("d0") == used


def test_an_empty_pool_refuses_new_requests_and_those_that_wait() -> None:
    for role, reason in ((Role.DECODE, "NO_DECODE"), (Role.PREFILL, "NO_PREFILL")):
        desk = Desk(limits=AdmissionLimits(max_active_requests=1))
        desk.offer()
        waiting = desk.offer()
        desk.report("d0" if role is Role.DECODE else "p0", role, draining=True)
        assert waiting.refused is not None
        assert waiting.refused.reason == reason
        with pytest.raises(Refused, match=reason):
            desk.offer()
        assert desk.admission.num_waiting == 0


def test_a_report_that_only_moves_the_load_does_not_look_at_each_waiting_request(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(limits=AdmissionLimits(max_active_requests=1))
    running, *waiting = [desk.offer() for _ in range(100)]
    looked_at: list[Demand] = []
    missing = desk.router.missing

    def count(demand: Demand) -> Missing | None:
        looked_at.append(demand)
        return missing(demand)

    monkeypatch.setattr(desk.router, "missing", count)
    for num_free in range(900, 1000):
        desk.report("d0", Role.DECODE, num_free_blocks=num_free)
    assert looked_at == []
    desk.report("d0", Role.DECODE, draining=True)
    assert len(looked_at) == len(waiting)
    assert {ticket.refused.reason for ticket in waiting if ticket.refused is not None} == {"NO_DECODE"}
    desk.admission.end(running)
    desk.admission.assert_nothing_held()


def test_requests_wait_at_the_gateway_when_decode_has_no_place_for_a_sequence() -> None:
    desk = Desk(max_num_seqs=2)
    tickets = [desk.offer() for _ in range(3)]
    assert (routed(tickets[1]), routed(tickets[2]), tickets[2].waited_for) == (True, False, Waiting.SEQUENCES)
    desk.admission.end(tickets[0])
    assert routed(tickets[2])


def test_samples_take_blocks_tokens_and_places_each_of_its_own() -> None:
    desk = Desk(num_blocks=100, num_free_blocks=100, max_num_seqs=4)
    three = desk.offer(num_prompt=20, max_new=30, n=3)
    assert three.route is not None
    # Two blocks of the prompt, the second one not full: two copies of it, and two blocks more for each of the three.
    assert (desk.ledger.num_used("d0"), three.num_kv_tokens) == (2 + 2 + 3 * 2, 20 + 3 * 30)
    two = desk.offer(n=2)
    assert (two.route, two.waited_for) == (None, Waiting.SEQUENCES)
    desk.admission.end(three)
    assert two.route is not None
    desk.admission.end(two)
    assert desk.instances["d0"].num_own_sequences == 0


def test_more_samples_than_an_instance_has_places_are_refused_unless_prefill_computes_all_there_is() -> None:
    desk = Desk(max_num_seqs=4)
    with pytest.raises(Refused, match="TOO_MANY_SAMPLES"):
        desk.offer(n=5)
    assert desk.offer(n=5, max_new=1).route is not None
    waiting = Desk(limits=AdmissionLimits(max_active_requests=1))
    waiting.offer()
    second = waiting.offer(n=3)
    waiting.report("d0", Role.DECODE, max_num_seqs=2)
    assert second.refused is not None
    assert second.refused.reason == "TOO_MANY_SAMPLES"


def test_limits_on_requests_and_on_tokens_make_requests_wait() -> None:
    for limits, waiting in ((AdmissionLimits(max_active_requests=1), Waiting.REQUESTS), (AdmissionLimits(max_total_kv_tokens=50), Waiting.KV_TOKENS)):
        desk = Desk(limits=limits)
        first, second = desk.offer(), desk.offer()
        assert (second.route, second.waited_for) == (None, waiting)
        desk.admission.end(first)
        assert routed(second)


def test_prompts_go_on_while_the_backlog_is_small_and_one_always_does() -> None:
    desk = Desk(limits=AdmissionLimits(max_prefill_backlog_tokens=100))
    tickets = [desk.offer(num_prompt=300), desk.offer(num_prompt=10)]
    assert tickets[0].route is not None, "an idle instance takes a prompt of any length"
    assert (tickets[1].route, tickets[1].waited_for) == (None, Waiting.PREFILL_BACKLOG)
    desk.report("p0", Role.PREFILL, prefill_backlog_tokens=100)
    assert tickets[1].route is not None, "it has computed the most of it"


def test_what_others_sent_counts_in_the_backlog() -> None:
    instance = Desk().instances["p0"]
    instance.backlog.report(500)
    assert instance.backlog.num_tokens == 500
    instance.backlog.sent(100)
    assert instance.backlog.num_tokens == 600
    instance.backlog.report(450)
    assert instance.backlog.num_tokens == 450
    instance.backlog.finished(100)
    assert instance.backlog.num_tokens == 350


def test_load_decides_between_instances() -> None:
    desk = Desk(num_decodes=2, num_prefills=2)
    routes = [desk.offer().route for _ in range(4)]
    assert sorted((route.decode.name, route.computing.name) for route in routes if route is not None) == [
        ("d0", "p0"),
        ("d0", "p0"),
        ("d1", "p1"),
        ("d1", "p1"),
    ]
    desk.report("d0", Role.DECODE, num_requests_running=50)
    assert {route.decode.name for route in (desk.offer().route for _ in range(3)) if route is not None} == {"d1"}


def test_layouts_that_differ_are_not_paired() -> None:
    desk = Desk(num_decodes=2, num_prefills=1)
    other = load_report(100, [2])
    other.layout.model_fingerprint = "another"
    desk.instances["d0"].report(other)
    assert {route.decode.name for route in (desk.offer().route for _ in range(3)) if route is not None} == {"d1"}
    desk.instances["d1"].report(other)
    with pytest.raises(Refused, match="NO_PREFILL"):
        desk.offer()


@pytest.mark.parametrize("field", ["block_size", "num_head_shards"])
def test_layouts_that_are_converted_while_kv_is_copied_are_paired(field: str) -> None:
    desk = Desk(num_decodes=1, num_prefills=1)
    other = load_report(100, [2])
    setattr(other.layout, field, getattr(other.layout, field) + 8)
    desk.instances["d0"].report(other)
    route = desk.offer().route
    assert route is not None
    assert (route.decode.name, route.computing.name) == ("d0", "p0")


def test_a_request_that_only_an_unpaired_instance_could_hold_is_refused_and_blocks_nobody() -> None:
    desk = Desk(num_decodes=2, num_prefills=1)
    large = load_report(100, [2], max_model_len=100_000, num_blocks=10_000)
    large.layout.model_fingerprint = "another"
    desk.instances["d0"].report(large)
    with pytest.raises(Refused, match="NO_PREFILL"):
        desk.offer(num_prompt=5_000)
    assert desk.offer().route is not None


def test_an_excluded_instance_is_not_used() -> None:
    desk = Desk(num_decodes=2)
    for _ in range(3):
        route = desk.offer(excluded=("d0",)).route
        assert route is not None
        assert route.decode.name == "d1"
    assert not desk.admission.can_serve(Demand(1, 1, frozenset(("d0", "d1"))))


def test_a_prefill_instance_that_went_after_admission_is_replaced() -> None:
    desk = Desk(num_prefills=2)
    ticket = desk.offer()
    assert ticket.route is not None
    gone = ticket.route.computing.name
    desk.instances[gone].lose("killed")
    route = desk.admission.confirm(ticket)
    assert route.computing.name != gone
    assert desk.instances[gone].backlog.own == 0
    route.computing.lose("killed")
    with pytest.raises(Refused, match="NO_PREFILL"):
        desk.admission.confirm(ticket)
    route.decode.lose("killed")
    with pytest.raises(Refused, match="NO_DECODE"):
        desk.admission.confirm(ticket)
    desk.admission.end(ticket)
    assert all(instance.backlog.own == instance.num_own_sequences == 0 for instance in desk.instances.values())


def test_the_time_to_come_back_follows_the_measured_rate() -> None:
    desk = Desk(limits=AdmissionLimits(max_active_requests=1))
    assert desk.admission.retry_after_s() == 1.0
    for _ in range(10):
        desk.admission.end(desk.offer())
        desk.clock.now += 0.5
    desk.offer()
    for _ in range(19):
        desk.offer()
    assert desk.admission.retry_after_s() == pytest.approx(20 / 2.2, rel=0.1)
    desk.clock.now += 100
    assert desk.admission.retry_after_s() == 1.0


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_happens_nothing_is_over_committed_lost_or_left(data: st.DataObject) -> None:
    limits = AdmissionLimits(max_active_requests=4, max_queue_requests=5, max_total_kv_tokens=300, max_prefill_backlog_tokens=60)
    desk = Desk(num_decodes=2, num_prefills=2, limits=limits, num_blocks=8, num_free_blocks=8, max_num_seqs=4)
    live: list[Ticket] = []
    reserved: set[str] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        live = [ticket for ticket in live if ticket.refused is None]
        match data.draw(st.sampled_from(["offer", "offer", "end", "done", "reserve", "refuse", "down", "up"])):
            case "offer":
                ticket = desk.ticket(
                    data.draw(st.integers(1, 120)), data.draw(st.integers(0, 80)), data.draw(st.integers(-1, 1)), n=data.draw(st.integers(1, 5))
                )
                try:
                    desk.admission.offer(ticket)
                    live.append(ticket)
                except Refused:
                    desk.admission.end(ticket)
            case "end" if live:
                desk.admission.end(live.pop(data.draw(st.integers(0, len(live) - 1))))
            case "done" if live:
                desk.admission.prompt_done(data.draw(st.sampled_from(live)))
            case "reserve" if live:
                ticket = data.draw(st.sampled_from(live))
                if ticket.route is not None and ticket.key not in reserved:
                    reserved.add(ticket.key)
                    desk.admission.answered(ticket, data.draw(st.integers(0, desk.router.num_blocks(ticket.demand, ticket.route.decode))))
            case "refuse" if live:
                desk.admission.refused_by_decode(data.draw(st.sampled_from(live)))
            case "down":
                name = data.draw(st.sampled_from(["d0", "d1", "p0", "p1"]))
                desk.report(name, desk.instances[name].role, draining=True)
            case "up":
                name = data.draw(st.sampled_from(["d0", "d1", "p0", "p1"]))
                used = desk.ledger.num_used(name)
                desk.report(name, desk.instances[name].role, num_free_blocks=8 - min(8, used))
            case _:
                pass
        admitted = [ticket for ticket in live if ticket.route is not None]
        waiting = sorted((ticket for ticket in live if ticket.route is None and ticket.refused is None), key=lambda t: t.order)
        assert (desk.admission.num_active, desk.admission.num_waiting) == (len(admitted), len(waiting))
        assert len(admitted) <= limits.max_active_requests
        assert sum(ticket.num_kv_tokens for ticket in admitted) <= 300
        assert all(desk.ledger.num_used(name) <= 8 and desk.instances[name].num_own_sequences <= 4 for name in ("d0", "d1"))
        if waiting:
            assert isinstance(desk.admission._place(waiting[0].demand), Waiting), "the head waits for something: no wake-up was lost"
    for ticket in live:
        desk.admission.end(ticket)
    desk.admission.assert_nothing_held()
    assert all(instance.backlog.own == instance.num_own_sequences == 0 for instance in desk.instances.values())
