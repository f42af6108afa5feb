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

    sent_s: float | None = None
    """When it was handed to the transport; None: it has not been."""
    ended_s: float | None = None
    """When its end was seen; None: it has not been."""
    arrived: list[Arrived] = field(default_factory=list)
    num_arrived_tokens: int = 0
    """Sum over `arrived`."""
    outcome: Outcome = Outcome.FAILED
    """OK: it ended as a stream should. Whether it is what was asked for is the runner's to say."""
    error: str = ""
    num_output_tokens: int | None = None
    """By the server's usage."""
    num_prompt_tokens: int | None = None
    """By the server's usage, where text was sent; None: as many as were sent."""
    num_cached_tokens: int = 0
    finish_reason: str = ""
    has_text: bool = False
    counted_by: str = "usage"
    path: str = ""

    def take(self, at_s: float, num_tokens: int) -> None:
        """Notes one message with tokens."""
        self.arrived.append(Arrived(at_s, num_tokens))
        self.num_arrived_tokens += num_tokens


class Clock(Protocol):
    """Seconds from the start of the run."""

    def __call__(self) -> float: ...


class Target(Protocol):
    """A server to be loaded. On one event loop."""

    name: str
    """Kind and address."""

    async def open(self) -> None:
        """Connects and asks who is there. Raises TargetError."""

    def encode(self, request: PlannedRequest) -> bytes:
        """What goes over the wire. Made ahead of the run: a long prompt takes milliseconds, which the requests sent meanwhile would wait for."""

    async def send(self, request: PlannedRequest, body: bytes, clock: Clock, exchange: Exchange) -> None:
        """Sends one request, `body` as `encode` made it, and takes its answer to the end. Once and no more: nothing is retried.

        Cancelled by the runner when time is up, it leaves nothing behind on the wire. Raises nothing but CancelledError: what went wrong is the
        exchange's outcome.
        """

    async def sample(self, clock: Clock) -> Sample | None:
        """The server's state now; None where it does not tell."""

    async def describe(self) -> dict[str, str]:
        """What it says of itself: version, model."""

    async def close(self) -> None: ...


class TargetError(Exception):
    """The server cannot be loaded; the text is for the user."""
