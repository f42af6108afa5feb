"""Records as a server would have left them, for tests of the figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.record import Arrived, Outcome, Record
from bench.run import Generator, Run


def record(
    index: int = 0,
    *,
    due_s: float | None = 0.0,
    sent_s: float | None = None,
    at_s: Sequence[float] = (),
    tokens: Sequence[int] | None = None,
    ended_s: float | None = None,
    outcome: Outcome = Outcome.OK,
    error: str = "",
    warm_up: bool = False,
    num_prompt_tokens: int = 10,
) -> Record:
    """Messages at `at_s`, of one token each unless `tokens` says otherwise; sent when due, ended with the last message."""
    sent = sent_s if sent_s is not None else due_s or 0.0
    arrived = tuple(Arrived(at, num) for at, num in zip(at_s, tokens or [1] * len(at_s), strict=True))
    total = sum(each.num_tokens for each in arrived)
    ended = ended_s if ended_s is not None else at_s[-1] if at_s else sent
    return Record(index, warm_up, due_s, sent, ended, arrived, outcome, error, num_prompt_tokens, max(total, 1), total, finish_reason="length")


def run_of(records: Sequence[Record], *, label: str = "run", void: tuple[str, ...] = ()) -> Run:
    duration_s = max((each.ended_s for each in records), default=0.0)
    plan = {"workload": "fixed", "loop": "open", "arrivals": "poisson", "scale": 1.0, "seed": 0, "num_requests": len(records), "num_warm_up": 0}
    return Run(label, "tandem 127.0.0.1:50051", plan, "2030-01-01T00:00:00Z", duration_s, tuple(records), Generator(0.001, 0.002, 0.1), {"cpu": "a"}, void=void)


def queue_records(rate_per_s: float, num_requests: int, rng: np.random.Generator, *, service_s: float = 1.0, exponential: bool = False) -> list[Record]:
    """One server, first come first served: Poisson arrivals, a service time that is fixed or exponential. Each answer is one token at its end."""
    due = np.cumsum(rng.exponential(1 / rate_per_s, num_requests))
    service = rng.exponential(service_s, num_requests) if exponential else np.full(num_requests, service_s)
    free, records = 0.0, []
    for index in range(num_requests):
        free = max(free, float(due[index])) + float(service[index])
        records.append(record(index, due_s=float(due[index]), at_s=[free]))
    return records
