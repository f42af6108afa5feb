"""One axis for all timestamps: monotonic readings of any thread, as wall-clock time."""

from __future__ import annotations

import time
from typing import Final

_RECALIBRATE_NS: Final = 30_000_000_000


class WallClock:
    """Converts `time.monotonic_ns()` to nanoseconds since the epoch.

    The offset is measured anew when it is older than 30 s, since the wall clock may be stepped and the monotonic clock is not.
    """

    def __init__(self) -> None:
        self._measured_ns = 0
        self._offset_ns = 0

    def offset_ns(self) -> int:
        """The number to add to a monotonic timestamp."""
        now_ns = time.monotonic_ns()
        if self._offset_ns == 0 or now_ns - self._measured_ns > _RECALIBRATE_NS:
            self._offset_ns = self._measure()
            self._measured_ns = now_ns
        return self._offset_ns

    @staticmethod
    def _measure() -> int:
        # The reading with the narrowest bracket is the one in which the thread was not descheduled.
        best: tuple[int, int] | None = None
        for _ in range(5):
            before_ns = time.monotonic_ns()
            wall_ns = time.time_ns()
            after_ns = time.monotonic_ns()
            reading = (after_ns - before_ns, wall_ns - (before_ns + after_ns) // 2)
            best = reading if best is None else min(best, reading)
        assert best is not None
        return best[1]
