"""How often, and how long, a client tries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """In force for every call of a client. Nothing is tried beyond a call's deadline, and no wait is begun that would reach it."""

    max_attempts: int = 5
    """Attempts until the first token, the first one counted. UNAVAILABLE is tried again, and RESOURCE_EXHAUSTED when the gateway says when; nothing else is."""
    max_resumes: int = 3
    """Cuts behind the first token after which the client goes on. Each may take as many attempts as max_total_wait_s has room for."""
    max_total_wait_s: float = 30.0
    """Most seconds that one call waits between its attempts."""
    initial_wait_s: float = 0.25
    """First wait where the gateway does not say how long; it doubles with each attempt that brings nothing. A wait that the gateway asks for is kept, and up to
    a fifth longer, so that clients that were refused together do not return together."""
    max_wait_s: float = 2.0
    """Longest wait of the client's own."""
    max_budget: float = 10.0
    """Refusals that all calls of the client together may try again after; see RetryBudget."""
    budget_ratio: float = 0.1
    """What a call that ends well gives back to the budget."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or self.max_resumes < 0:
            raise ValueError("max_attempts is at least 1 and max_resumes at least 0")
        for name in ("max_total_wait_s", "initial_wait_s", "max_wait_s", "max_budget", "budget_ratio"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is at least 0")

    @classmethod
    def never(cls) -> RetryPolicy:
        """One attempt, and no resume."""
        return cls(max_attempts=1, max_resumes=0)
