"""Admission: who runs now, who waits, who is refused. Pure: no event loop, no wall clock of its own, so that a simulation can run it under a virtual one.

A request is admitted when the ledger has its blocks in a decode instance, the instance that computes its prompt is not behind, and the limits allow one more.
Otherwise it waits, by priority and then in order of arrival; nobody overtakes the head of the queue, so a large request is not starved by small ones.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.ledger import Ledger
from gateway.limits import AdmissionLimits
from gateway.router import Demand, Missing, Route, Router, Waiting

_DRAIN_WINDOW_S = 10.0
_DEFAULT_RETRY_S = 1.0
_MIN_RETRY_S = 0.1


class Refused(Exception):
    """A request is not served; `reason` is QUEUE_FULL, QUEUE_TIMEOUT, or a Missing; `retry_after_s` is a guess from the drain rate."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class Ticket:
    """One request at admission: it waits until `route` or `refused` is set, and `settled` is then called once."""

    key: str
    tenant: str
    priority: int
    arrival: int
    """Order of arrival; kept when a request comes back from decode, which puts it in front again."""
    demand: Demand
    settled: Callable[[], None]
    """Must not call admission back."""
    route: Route | None = None
    refused: Refused | None = None
    num_kv_tokens: int = 0
    num_places: int = 0
    waited_for: Waiting | None = None
    position: int = 0
    """Requests in front of it when it began to wait."""
    prompt_pending: bool = False
    """Its prompt counts in the backlog of the instance that computes it."""

    @property
    def order(self) -> tuple[int, int]:
        """Place in the queue."""
        return (self.priority, self.arrival)


class Admission:
    """The queue and what has been admitted. Every call that could make room ends in `pump`, so no wake-up is lost."""

    def __init__(self, limits: AdmissionLimits, ledger: Ledger, router: Router, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self.limits = limits
        self._ledger = ledger
        self._router = router
        self._clock = clock
        self._queue: list[Ticket] = []
        self._active: set[str] = set()
        self._num_active_tokens = 0
        self._num_queued_tokens = 0
        self._admitted: deque[float] = deque(maxlen=1024)
        self._num_arrivals = 0
        self._shapes = router.shapes()

    @property
    def num_active(self) -> int:
        """Requests admitted and not yet ended."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def next_arrival(self) -> int:
        """A number for a new request's ticket."""
        self._num_arrivals += 1
        return self._num_arrivals

    def offer(self, ticket: Ticket, *, again: bool = False) -> None:
        """Admits a ticket at once or lets it wait. Raises Refused; `again`: it was admitted before, so the queue's limits do not count."""
        refused = self._refusal(ticket.demand)
        if refused is not None:
            raise refused
        insort(self._queue, ticket, key=lambda queued: queued.order)
        self._num_queued_tokens += ticket.demand.num_prompt_tokens
        ticket.position = self._queue.index(ticket)
        self.pump()
        too_many = len(self._queue) > self.limits.max_queue_requests or self._num_queued_tokens > self.limits.max_queue_tokens
        if ticket.route is None and not again and too_many:
            self._unqueue(ticket)
            raise Refused("QUEUE_FULL", self.retry_after_s())

    def pump(self) -> None:
        """Admits from the head of the queue what fits now."""
        while self._queue and self._admit(self._queue[0]):
            pass

    def instances_changed(self) -> None:
        """Instances came, went or reported: refuses at once what can be served no more, and admits what fits."""
        shapes = self._router.shapes()
        if shapes != self._shapes:  # a report that only moves the load cannot make a request unservable, and there are hundreds of those a second
            self._shapes = shapes
            self._refuse_unservable()
        self.pump()

    def _refuse_unservable(self) -> None:
        for ticket in tuple(self._queue):
            refused = self._refusal(ticket.demand)
            if refused is not None:
                self._unqueue(ticket)
                ticket.refused = refused
                ticket.settled()

    def confirm(self, ticket: Ticket) -> Route:
        """The route as it can be used now: a prefill instance that has gone since is replaced. Raises Refused when decode has gone, or all of prefill."""
        route = ticket.route
        assert route is not None, "confirm follows admission"
        if not route.decode.available:
            raise Refused(Missing.NO_DECODE.value, _DEFAULT_RETRY_S)
        if route.computing.available:
            return route
        computing = self._router.computing_for(route.decode)
        if computing is None:
            raise Refused(Missing.NO_PREFILL.value, _DEFAULT_RETRY_S)
        if ticket.prompt_pending:
            route.computing.backlog.finished(ticket.demand.num_prompt_tokens)
            computing.backlog.sent(ticket.demand.num_prompt_tokens)
        ticket.route = Route(route.decode, None if computing is route.decode else computing)
        return ticket.route

    def prompt_done(self, ticket: Ticket) -> None:
        """The prompt is computed; idempotent."""
        if ticket.prompt_pending and ticket.route is not None:
            ticket.prompt_pending = False
            ticket.route.computing.backlog.finished(ticket.demand.num_prompt_tokens)
            self.pump()

    def answered(self, ticket: Ticket, num_charged_blocks: int | None) -> None:
        """Decode has answered, with the real charge where it reserved."""
        if num_charged_blocks is None:
            self._ledger.answered(ticket.key)
        else:
            self._ledger.correct(ticket.key, num_charged_blocks)
            self.pump()

    def can_serve(self, demand: Demand) -> bool:
        """Whether waiting for a place may be of use."""
        return self._router.missing(demand) is None

    def end(self, ticket: Ticket) -> None:
        """Gives everything back, whatever state the ticket is in; idempotent."""
        if ticket in self._queue:
            self._unqueue(ticket)
        if ticket.key in self._active and ticket.route is not None:
            self._active.discard(ticket.key)
            self._num_active_tokens -= ticket.num_kv_tokens
            self._ledger.close(ticket.key)
            ticket.route.decode.num_own_sequences -= ticket.num_places
            if ticket.prompt_pending:
                ticket.prompt_pending = False
                ticket.route.computing.backlog.finished(ticket.demand.num_prompt_tokens)
        self.pump()

    def refused_by_decode(self, ticket: Ticket) -> None:
        """Decode had no blocks for it; the instance gets nothing more until it reports, gives back, or `retry`."""
        if ticket.route is not None:
            self._ledger.refuse(ticket.route.decode.name)

    def retry(self, decode: str) -> None:
        """Asks an instance again that had refused."""
        self._ledger.retry(decode)
        self.pump()

    def retry_after_s(self) -> float:
        """Seconds until a request that came now would be admitted, from the rate of the last ten seconds; 1 when there is none."""
        now = self._clock()
        recent = [at for at in self._admitted if now - at <= _DRAIN_WINDOW_S]
        if len(recent) < 2:
            return _DEFAULT_RETRY_S
        rate = len(recent) / max(now - recent[0], 1e-3)
        return min(max((len(self._queue) + 1) / rate, _MIN_RETRY_S), self.limits.max_queue_time_s)

    def assert_nothing_held(self) -> None:
        """Raises AssertionError that names what is left."""
        assert not self._active, f"active: {sorted(self._active)}"
        assert not self._queue and self._num_active_tokens == self._num_queued_tokens == 0, "tokens are counted and nobody has them"
        self._ledger.assert_nothing_held()

    def _refusal(self, demand: Demand) -> Refused | None:
        missing = self._router.missing(demand)
        for_ever = missing in (Missing.TOO_LONG, Missing.TOO_MANY_SAMPLES)
        return Refused(missing.value, None if for_ever else _DEFAULT_RETRY_S) if missing is not None else None

    def _admit(self, ticket: Ticket) -> bool:
        route = self._place(ticket.demand)
        if isinstance(route, Waiting):
            ticket.waited_for = ticket.waited_for or route
            return False
        self._unqueue(ticket)
        self._ledger.open(ticket.key, route.decode.name, ticket.tenant, self._router.num_blocks(ticket.demand, route.decode))
        self._active.add(ticket.key)
        ticket.route, ticket.num_kv_tokens, ticket.prompt_pending = route, ticket.demand.num_kv_tokens(route.decode), True
        self._num_active_tokens += ticket.num_kv_tokens
        ticket.num_places = self._router.num_places(ticket.demand)
        route.decode.num_own_sequences += ticket.num_places
        route.computing.backlog.sent(ticket.demand.num_prompt_tokens)
        self._admitted.append(self._clock())
        ticket.settled()
        return True

    def _place(self, demand: Demand) -> Route | Waiting:
        if len(self._active) >= self.limits.max_active_requests:
            return Waiting.REQUESTS
        route = self._router.route(demand)
        limit = self.limits.max_total_kv_tokens
        if limit is not None and isinstance(route, Route) and self._num_active_tokens + demand.num_kv_tokens(route.decode) > limit:
            return Waiting.KV_TOKENS
        return route

    def _unqueue(self, ticket: Ticket) -> None:
        self._queue.remove(ticket)
        self._num_queued_tokens -= ticket.demand.num_prompt_tokens
