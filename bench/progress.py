"""How far a run is, for those who watch it."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field

from bench.record import Outcome, Record
from bench.target import Exchange


@dataclass(slots=True)
class Progress:
    """Kept by the runner, on the event loop. Warm-up included, cold start not."""

    num_planned: int = 0
    clock_s: float = 0.0
    """When it was last changed."""
    num_sent: int = 0
    out: dict[int, Exchange] = field(default_factory=dict)
    """Requests on their way, by index."""
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    ttfts_s: list[float] = field(default_factory=list)
    """Sorted; from the schedule, of those that ended well."""
    worst_lag_s: float = 0.0
    _ended_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens so far, those of requests on their way too."""
        return self._ended_tokens + sum(exchange.num_arrived_tokens for exchange in self.out.values())

    @property
    def ttft_p50_s(self) -> float | None:
        return self.ttfts_s[len(self.ttfts_s) // 2] if self.ttfts_s else None

    def began(self, index: int, exchange: Exchange) -> None:
        self.num_sent += 1
        self.out[index] = exchange

    def ended(self, record: Record) -> None:
        self.clock_s = record.ended_s
        self.out.pop(record.index, None)
        self.outcomes[record.outcome] += 1
        self._ended_tokens += record.num_output_tokens
        self.worst_lag_s = max(self.worst_lag_s, record.sent_s - record.scheduled_s)
        if record.outcome is Outcome.OK and record.first_token_s is not None:
            insort(self.ttfts_s, record.first_token_s - record.scheduled_s)
