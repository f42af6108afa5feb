"""Readers that were told to stop and have not ended: named, counted, and an alarm after a bound. Their blocks stay theirs as long as they are here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

_logger = logging.getLogger(__name__)


def _log_only(reader_id: str) -> None:
    """The log is alarm enough."""


def _no_end() -> None:
    """Nobody counts."""


class Quarantine:
    """The readers of one engine's memory that are past their stop. Lives on the event loop.

    `on_alarm` is called for each that has not ended `max_stop_s` later, `on_end` when such a one ends after all.
    """

    def __init__(self, *, max_stop_s: float = 5.0, on_alarm: Callable[[str], None] = _log_only, on_end: Callable[[], None] = _no_end) -> None:
        self._max_stop_s = max_stop_s
        self._on_alarm = on_alarm
        self._on_end = on_end
        self._alarmed: set[str] = set()
        self._alarms: dict[str, asyncio.TimerHandle] = {}

    @property
    def reader_ids(self) -> tuple[str, ...]:
        """Readers past their stop, oldest first."""
        return tuple(self._alarms)

    def enter(self, reader_id: str) -> None:
        """A reader was told to stop and still runs."""
        if reader_id not in self._alarms:
            self._alarms[reader_id] = asyncio.get_running_loop().call_later(self._max_stop_s, self._alarm, reader_id)

    def leave(self, reader_id: str) -> None:
        """A reader has ended. Idempotent."""
        alarm = self._alarms.pop(reader_id, None)
        if alarm is not None:
            alarm.cancel()
        if reader_id in self._alarmed:
            self._alarmed.remove(reader_id)
            _logger.warning("%s has ended at last", reader_id)
            self._on_end()

    def _alarm(self, reader_id: str) -> None:
        self._alarmed.add(reader_id)
        _logger.error("%s was told to stop %.1f s ago and has not ended; its blocks stay in quarantine", reader_id, self._max_stop_s)
        self._on_alarm(reader_id)
