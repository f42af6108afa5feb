"""Admission under a clock that stands still."""

from __future__ import annotations

import itertools
from typing import Any

from gateway.admission import Admission, Ticket
from gateway.instances import Instance, Role
from gateway.ledger import Ledger
from gateway.limits import AdmissionLimits
from gateway.router import Demand, Router
from tests.gateway.fake_decode import load_report


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """An admission with its instances, under a clock that stands still until it is moved."""

    def __init__(self, num_decodes: int = 1, num_prefills: int = 1, limits: AdmissionLimits | None = None, **load: Any) -> None:
        limits = limits or AdmissionLimits()
        self.clock = Clock()
        self.ledger = Ledger()
        self.instances: dict[str, Instance] = {}
        self.load = load
        self.router = Router(
            self.instances, self.ledger, max_prefill_backlog_tokens=limits.max_prefill_backlog_tokens, max_total_kv_tokens=limits.max_total_kv_tokens
        )
        self.admission = Admission(limits, self.ledger, self.router, self.clock)
        self.names = itertools.count()
        for index in range(num_decodes):
            self.report(f"d{index}", Role.DECODE)
        for index in range(num_prefills):
            self.report(f"p{index}", Role.PREFILL)

    def report(self, name: str, role: Role, **fields: Any) -> None:
        instance = self.instances.setdefault(name, Instance(name, role))
        instance.report(load_report(100, [2], **{**self.load, **fields}))
        if role is Role.DECODE and instance.load is not None:
            self.ledger.report(name, num_blocks=instance.load.num_blocks, num_free=instance.load.num_free_blocks)
        self.admission.instances_changed()

    def ticket(
        self, num_prompt: int = 16, max_new: int = 16, priority: int = 0, arrival: int | None = None, excluded: tuple[str, ...] = (), n: int = 1
    ) -> Ticket:
        arrival = self.admission.next_arrival() if arrival is None else arrival
        return Ticket(f"r{next(self.names)}", "t", priority, arrival, Demand(num_prompt, max_new, frozenset(excluded), n), lambda: None)

    def offer(self, **fields: Any) -> Ticket:
        ticket = self.ticket(**fields)
        self.admission.offer(ticket)
        return ticket
