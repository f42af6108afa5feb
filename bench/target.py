"""The seam between the load generator and a server: one generator, one set of definitions, any protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from bench.plan import PlannedRequest
from bench.record import Arrived, Outcome
from bench.run import Sample


@dataclass(slots=True)
class Exchange:
    """One request on its way, filled by the target as it happens. Times are of `clock`, seconds from the start of the run."""

    sent_s: float = 0.0
    ended_s: float = 0.0
    arrived: list[Arrived] = field(default_factory=list)
    outcome: Outcome = Outcome.FAILED
    error: str = ""
    num_output_tokens: int | None = None
    """By the server's usage."""
    num_cached_tokens: int = 0
    finish_reason: str = ""
    has_text: bool = False
    counted_by: str = "usage"
    path: str = ""


class Clock(Protocol):
    """Seconds from the start of the run."""

    def __call__(self) -> float: ...


class Target(Protocol):
    """A server to be loaded. On one event loop."""

    name: str
    """Kind and address."""

    async def open(self) -> None:
        """Connects and asks who is there. Raises TargetError."""

    async def send(self, request: PlannedRequest, clock: Clock, exchange: Exchange, *, timeout_s: float) -> None:
        """Sends one request and takes its answer to the end. Raises nothing but CancelledError: what went wrong is the exchange's outcome."""

    async def sample(self, clock: Clock) -> Sample | None:
        """The server's state now; None where it does not tell."""

    async def describe(self) -> dict[str, str]:
        """What it says of itself: version, model."""

    async def close(self) -> None: ...


class TargetError(Exception):
    """The server cannot be loaded; the text is for the user."""
