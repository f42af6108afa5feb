"""Named points at which a test makes a service slow: TANDEM_FAILPOINTS="tokenize=delay:0.05,reserve=delay:0.05".

A test facility. When unset a point costs one look into an empty dictionary.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Final

from telemetry.spans import SEGMENTS

ENVIRONMENT_VARIABLE: Final = "TANDEM_FAILPOINTS"
_delays_s: dict[str, float] = {}
_num_waiting: Counter[str] = Counter()


def configure_failpoints(text: str) -> None:
    """Replaces all points by those of `text` (empty: none). Raises ValueError that names the faulty entry; nothing is changed then."""
    delays_s: dict[str, float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, separator, action = entry.partition("=")
        kind, _, argument = action.partition(":")
        if not separator or kind != "delay":
            raise ValueError(f"failpoint {entry!r}: expected <name>=delay:<seconds>")
        if name not in SEGMENTS:
            raise ValueError(f"failpoint {entry!r}: unknown name, expected one of {', '.join(SEGMENTS)}")
        if not argument.replace(".", "", 1).isdecimal():
            raise ValueError(f"failpoint {entry!r}: {argument!r} is no number of seconds")
        delays_s[name] = float(argument)
    _delays_s.clear()
    _delays_s.update(delays_s)


def active_failpoints() -> dict[str, float]:
    """The delays in force, in seconds by name."""
    return dict(_delays_s)


async def failpoint(name: str) -> None:
    """Waits as long as the point says."""
    if _delays_s and name in _delays_s:
        _num_waiting[name] += 1
        try:
            await asyncio.sleep(_delays_s[name])
        finally:
            _num_waiting[name] -= 1


def num_waiting_at(name: str) -> int:
    """How many of this process's RPCs wait at a point now."""
    return _num_waiting[name]


def failpoint_sync(name: str) -> None:
    """The same for a thread that is not an event loop's."""
    if _delays_s and name in _delays_s:
        time.sleep(_delays_s[name])
