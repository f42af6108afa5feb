"""Waits and bounds, under a clock that stands still."""

from __future__ import annotations

import grpc
import pytest

from tandem_client.attempts import Attempts, NoMoreAttempts
from tandem_client.failure import Failure
from tandem_client.retry_budget import RetryBudget
from tandem_client.retry_policy import RetryPolicy

_GONE = Failure(grpc.StatusCode.UNAVAILABLE, "connection refused")


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _attempts(policy: RetryPolicy, timeout_s: float | None = None, *, draw: float = 1.0, clock: _Clock | None = None) -> Attempts:
    return Attempts(policy, RetryBudget(policy.max_budget, policy.budget_ratio), timeout_s, clock=clock or _Clock(), draw=lambda: draw)


def _refusal(retry_after_s: float | None, code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED) -> Failure:
    return Failure(code, "full", "QUEUE_FULL", retry_after_s=retry_after_s)


def test_own_waits_double_up_to_the_longest_and_are_spread_over_their_upper_half() -> None:
    policy = RetryPolicy(max_attempts=9, initial_wait_s=0.25, max_wait_s=2.0)
    late, early = _attempts(policy), _attempts(policy, draw=0.0)
    assert [late.after(_GONE) for _ in range(6)] == [0.25, 0.5, 1.0, 2.0, 2.0, 2.0]
    assert [early.after(_GONE) for _ in range(6)] == [0.125, 0.25, 0.5, 1.0, 1.0, 1.0]


def test_the_servers_wait_is_kept_and_spread_behind_it() -> None:
    policy = RetryPolicy()
    assert _attempts(policy, draw=0.0).after(_refusal(1.5)) == 1.5
    assert _attempts(policy, draw=1.0).after(_refusal(1.5)) == pytest.approx(1.8)


def test_resource_exhausted_without_a_time_to_come_back_is_final() -> None:
    with pytest.raises(NoMoreAttempts):
        _attempts(RetryPolicy()).after(_refusal(None))


def test_tokens_start_the_waits_anew() -> None:
    attempts = _attempts(RetryPolicy(max_attempts=9, initial_wait_s=0.25))
    assert [attempts.after(_GONE) for _ in range(3)] == [0.25, 0.5, 1.0]
    assert attempts.after(_GONE, began=True, advanced=True) == 0.25
    assert [attempts.after(_GONE, began=True) for _ in range(2)] == [0.25, 0.5]
    assert (attempts.num_retries, attempts.num_resumes) == (5, 1)


def test_behind_the_first_token_only_the_waits_bound_the_attempts() -> None:
    attempts = _attempts(RetryPolicy(max_attempts=1, initial_wait_s=1.0, max_wait_s=1.0, max_total_wait_s=5.0))
    attempts.after(_GONE, began=True, advanced=True)
    for _ in range(4):
        attempts.after(_GONE, began=True)
    with pytest.raises(NoMoreAttempts, match="max_total_wait_s"):
        attempts.after(_GONE, began=True)


def test_a_wait_that_would_reach_the_deadline_is_not_begun() -> None:
    clock = _Clock()
    attempts = _attempts(RetryPolicy(initial_wait_s=1.0), 2.5, clock=clock)
    assert attempts.begin() == 2.5
    attempts.after(_GONE)
    clock.now = 2.0
    assert attempts.begin() == 0.5
    with pytest.raises(NoMoreAttempts, match=r"0\.5 s are left"):
        attempts.after(_GONE)
    clock.now = 9.0
    assert attempts.begin() == 0.0


def test_the_budget_stops_retries_at_half_and_calls_that_end_well_refill_it() -> None:
    budget = RetryBudget(10.0, 0.5)
    assert [budget.refused() for _ in range(6)] == [True] * 4 + [False] * 2
    for _ in range(4):
        budget.went_well()
    assert budget.refused() is False
    for _ in range(100):
        budget.went_well()
    assert [budget.refused() for _ in range(5)] == [True] * 4 + [False], "never more than full"


def test_broken_connections_take_nothing_from_the_budget() -> None:
    policy = RetryPolicy(max_attempts=100, max_total_wait_s=1e6, max_budget=1.0)
    attempts = _attempts(policy)
    for _ in range(50):
        attempts.after(_GONE)
    with pytest.raises(NoMoreAttempts, match="max_budget"):
        attempts.after(_refusal(0.1))


@pytest.mark.parametrize("field", ["max_attempts", "max_resumes", "max_total_wait_s", "initial_wait_s", "max_wait_s", "max_budget", "budget_ratio"])
def test_a_policy_that_makes_no_sense_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RetryPolicy(**{field: -1})
    with pytest.raises(ValueError, match="timeout_s"):
        _attempts(RetryPolicy(), -1.0)
