"""One call's attempts: how long each may take, and whether another one follows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import grpc

from tandem_client.errors import TandemError
from tandem_client.failure import Failure
from tandem_client.retry_budget import RetryBudget
from tandem_client.retry_policy import RetryPolicy


class NoMoreAttempts(Exception):
    """The failure is final; the text says why, for people."""


class Attempts:
    """Waits for nothing itself: its caller does, in whatever way it waits."""

    def __init__(
        self,
        policy: RetryPolicy,
        budget: RetryBudget,
        timeout_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`timeout_s` covers all attempts and runs from the first one's start; `draw` gives 0 to 1."""
        if timeout_s is not None and not timeout_s >= 0:
            raise ValueError(f"timeout_s is {timeout_s}")
        self.num_retries = 0
        self.num_resumes = 0
        self._policy = policy
        self._budget = budget
        self._timeout_s = timeout_s
        self._clock = clock
        self._draw = draw
        self._ends_at: float | None = None
        self._num_begun = 0
        self._num_in_vain = 0
        """Attempts in a row that brought nothing."""
        self._waited_s = 0.0

    @property
    def number(self) -> int:
        """Of the attempt that runs, from 1."""
        return self._num_begun

    def begin(self) -> float | None:
        """The next attempt's timeout in seconds."""
        if self._timeout_s is not None and self._ends_at is None:
            self._ends_at = self._clock() + self._timeout_s
        self._num_begun += 1
        return self._remaining_s()

    def after(self, failure: Failure, *, began: bool = False, advanced: bool = False) -> float:
        """Seconds to wait before the next attempt. Raises NoMoreAttempts.

        `began`: some attempt has brought tokens, `advanced`: this one has.
        """
        self._check(failure, began=began, advanced=advanced)
        wait_s = self._wait_s(failure)
        remaining_s = self._remaining_s()
        if remaining_s is not None and wait_s >= remaining_s:
            raise NoMoreAttempts(f"not tried again: {remaining_s:.1f} s are left until the deadline, and the wait would take {wait_s:.1f} s")
        if self._waited_s + wait_s > self._policy.max_total_wait_s:
            raise NoMoreAttempts(f"not tried again: it has waited {self._waited_s:.1f} s, and would for {wait_s:.1f} s (max_total_wait_s)")
        self._waited_s += wait_s
        if advanced:
            self.num_resumes += 1
        else:
            self.num_retries += 1
        return wait_s

    def wait_after(self, error: Any) -> float:
        """The same behind a grpc.RpcError, for calls that bring nothing until they have ended. Raises TandemError."""
        failure = Failure.of(error)
        try:
            return self.after(failure)
        except NoMoreAttempts as final:
            raised = TandemError.of(failure)
            raised.add_note(str(final))
            raise raised from error

    def ended_well(self) -> None:
        """The call has its answer."""
        self._budget.went_well()

    def _check(self, failure: Failure, *, began: bool, advanced: bool) -> None:
        self._num_in_vain = 0 if advanced else self._num_in_vain + 1
        if not _may_pass(failure, began=began):
            raise NoMoreAttempts("not tried again: this does not pass by itself")
        if failure.reason and not self._budget.refused() and not advanced:
            raise NoMoreAttempts("not tried again: too many of this client's calls are refused (RetryPolicy.max_budget)")
        if advanced and self.num_resumes >= self._policy.max_resumes:
            raise NoMoreAttempts(f"not resumed: {self._policy.max_resumes} cuts are the most (RetryPolicy.max_resumes)")
        if not began and self._num_in_vain >= self._policy.max_attempts:
            raise NoMoreAttempts(f"not tried again: {self._policy.max_attempts} attempts are the most (RetryPolicy.max_attempts)")

    def _wait_s(self, failure: Failure) -> float:
        if failure.retry_after_s is not None:
            return failure.retry_after_s * (1 + 0.2 * self._draw())
        doubled = self._policy.initial_wait_s * 2.0 ** min(max(self._num_in_vain - 1, 0), 30)
        return min(self._policy.max_wait_s, doubled) * (1 + self._draw()) / 2

    def _remaining_s(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - self._clock())


def _may_pass(failure: Failure, *, began: bool) -> bool:
    """Whether another attempt makes sense. A resume repeats nothing, so behind the first token any break of the connection may be followed by one."""
    if failure.code is grpc.StatusCode.UNAVAILABLE:
        return True
    if failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return failure.retry_after_s is not None
    return began and failure.is_cut
