"""What keeps a client from hammering a server that is ill."""

from __future__ import annotations

import threading


class RetryBudget:
    """A bucket shared by all calls of a client, as gRPC's own retry throttling has it (gRFC A6); from any thread.

    A refusal takes one out, a call that ends well puts `ratio` back, and as long as the bucket is at most half full nothing is tried again: while few calls
    fail, all of these are tried again; once most fail, hardly any is. Connections that fail are not counted: they cost the server nothing, the channel paces
    them by itself for all calls together, and counting them would have one restart of the gateway end the streams that a resume is there for.
    """

    def __init__(self, size: float, ratio: float) -> None:
        self._size = size
        self._ratio = ratio
        self._left = size
        self._lock = threading.Lock()

    def refused(self) -> bool:
        """Takes note of a refusal; whether one may try again after it."""
        with self._lock:
            self._left = max(0.0, self._left - 1.0)
            return self._left > self._size / 2

    def went_well(self) -> None:
        """Takes note of a call that ended well."""
        with self._lock:
            self._left = min(self._size, self._left + self._ratio)
