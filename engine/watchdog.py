"""Ends a process whose engine thread or event loop makes no progress, even when the GIL is held (design rule 7)."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable


class Watchdog:
    """Keeps `faulthandler.dump_traceback_later(max_stall_s, exit=True)` armed, and re-arms it only while every beat advances.

    A beat is a function that returns a number that grows while its owner makes progress, or None while its owner is idle by its own
    word. The timer runs in a thread of C that needs no GIL: when it fires, all tracebacks go to stderr and the process exits with 1.
    One per process.
    """

    def __init__(self, max_stall_s: float, beats: dict[str, Callable[[], int | None]]) -> None:
        if max_stall_s <= 0:
            raise ValueError(f"max_stall_s must be positive, got {max_stall_s}")
        self._max_stall_s = max_stall_s
        self._beats = beats
        self._seen: dict[str, int | None] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Arms the timer."""
        self._arm()
        self._thread.start()

    def stop(self) -> None:
        """Disarms it."""
        self._stop.set()
        self._thread.join(timeout=self._max_stall_s)
        faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._max_stall_s, exit=True, file=sys.__stderr__ or sys.stderr)

    def _run(self) -> None:
        while not self._stop.wait(self._max_stall_s / 5):
            if self._all_advanced():
                self._arm()

    def _all_advanced(self) -> bool:
        """Every owner has moved since the last time that all of them had."""
        now = {name: beat() for name, beat in self._beats.items()}
        if any(value is not None and self._seen.get(name) == value for name, value in now.items()):
            return False
        self._seen = now
        return True
