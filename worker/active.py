"""How many requests an instance has in hand, and the bound on it: no queue behind it is longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rpc.errors import exhausted

_RETRY_S = 1.0


class ActiveRequests:
    """Counts handlers from their start to their end."""

    def __init__(self, max_active_requests: int) -> None:
        self._max = max_active_requests
        self.num = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """One request. Raises StatusError RESOURCE_EXHAUSTED when there are too many."""
        if self.num >= self._max:
            raise exhausted("QUEUE_FULL", f"the instance has {self.num} requests, its max_active_requests", _RETRY_S)
        self.num += 1
        try:
            yield
        finally:
            self.num -= 1
