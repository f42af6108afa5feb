"""What will be sent and when, all of it decided before the first request: nothing that a server does can change the load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Loop(Enum):
    """Who decides when a request is sent. It is stated with every result: the two answer different questions."""

    OPEN = "open"
    """The schedule does: each request has its time, whatever has become of those before it."""
    CLOSED = "closed"
    """An answer does: so many requests are always out, and the next one is sent when one has ended."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, with the exact tokens that go out."""

    index: int
    """Its place in the plan, from 0."""
    prompt_token_ids: Sequence[int]
    max_tokens: int
    """Tokens that the answer must have; the model's own end is ignored."""
    due_s: float | None = None
    """Seconds from the start of the run; None in a closed loop."""
    warm_up: bool = False
    """Sent and checked, and in no figure."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run's requests in the order in which they are sent."""

    requests: tuple[PlannedRequest, ...]
    loop: Loop
    workload: str
    """Name of the workload, such as azure-conv."""
    arrivals: str
    """In words: poisson 2.5/s, gamma 2.5/s cv 3, trace x1, concurrency 8."""
    scale: float
    """What all lengths of the workload were multiplied by; 1: as they are."""
    seed: int
    concurrency: int | None = None
    """Requests that are out at the same time in a closed loop."""

    def __post_init__(self) -> None:
        assert (self.concurrency is None) is (self.loop is Loop.OPEN)
        assert all((request.due_s is None) is (self.loop is Loop.CLOSED) for request in self.requests)

    @property
    def duration_s(self) -> float:
        """When the last request is due; 0 in a closed loop."""
        return max((request.due_s or 0.0 for request in self.requests), default=0.0)
