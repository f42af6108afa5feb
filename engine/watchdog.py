"""Ends a process whose engine thread or event loop makes no progress, even when the GIL is held (design rule 7)."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)
_LOOKS = 5
"""Looks in the time after which a stall is the end."""


class Watchdog:
    """Keeps `faulthandler.dump_traceback_later(max_stall_s, exit=True)` armed, and re-arms it only while every beat advances.

    A beat is a function that returns a number that grows while its owner makes progress, or None while its owner is idle by its own
    word. The timer runs in a thread of C that needs no GIL: when it fires, all tracebacks go to stderr and the process exits with 1.
    Whoever stands still is named in the log half way there, as far as the GIL allows. One per process.
    """

    def __init__(self, max_stall_s: float, beats: dict[str, Callable[[], int | None]]) -> None:
        if max_stall_s <= 0:
            raise ValueError(f"max_stall_s must be positive, got {max_stall_s}")
        self._max_stall_s = max_stall_s
        self._beats = beats
        self._seen: dict[str, int | None] = {}
        self._num_looks_without_progress = 0
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
        while not self._stop.wait(self._max_stall_s / _LOOKS):
            if stalled := self._look():
                self._num_looks_without_progress += 1
                if self._num_looks_without_progress == _LOOKS // 2:
                    _log.critical("no progress of %s: the process ends after %g s of it", " and ".join(stalled), self._max_stall_s)
            else:
                self._num_looks_without_progress = 0
                self._arm()

    def _look(self) -> list[str]:
        """Owners that have not moved since the last time that all of them had."""
        now = {name: beat() for name, beat in self._beats.items()}
        stalled = [name for name, value in now.items() if value is not None and self._seen.get(name) == value]
        if not stalled:
            self._seen = now
        return stalled
