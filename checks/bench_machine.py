"""Whether the machine left generator and server alone while they ran: a figure that is off says something of the generator only if it did."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_OTHERS = 0.15
"""Cores that processes of somebody else, and the hypervisor, may take."""
MAX_WAITED = 0.02
"""Share of the time that threads of ours may stand ready to run, and not run."""
_QUIET_S = 0.5
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Busy:
    """What was in the way."""

    others: float
    """Cores."""
    waited: float
    """Share of the time, of the process that waited the longest."""

    @property
    def is_quiet(self) -> bool:
        return self.others <= MAX_OTHERS and self.waited <= MAX_WAITED

    def __str__(self) -> str:
        return f"others took {self.others:.2f} cores, ours waited {self.waited:.1%} of the time for one"


async def until_quiet(timeout_s: float) -> None:
    """Returns when others have left the machine alone for half a second, or the time is up. For who has no process at work."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        machine = Machine([])
        await asyncio.sleep(_QUIET_S)
        if machine.busy().others <= MAX_OTHERS:
            return


class Machine:
    """Counts from when it is made."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._started_s = time.monotonic()
        self._before = self._read()

    def busy(self) -> Busy:
        """So far."""
        wall_s = time.monotonic() - self._started_s
        busy_s, ours_s, waited_s = self._read()
        others_s = (busy_s - self._before[0]) - (ours_s - self._before[1])
        waited = max((after - before for after, before in zip(waited_s, self._before[2], strict=True)), default=0.0)
        return Busy(max(others_s, 0.0) / wall_s, waited / wall_s)

    def _read(self) -> tuple[float, float, list[float]]:
        """Seconds of all cores, of our processes, and that each of ours waited."""
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(each) for each in Path("/proc/stat").read_text().split()[1:9])
        ours = 0.0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ours += (int(fields[11]) + int(fields[12])) * _TICK_S
        return (user + nice + system + irq + softirq + steal) * _TICK_S, ours, [_waited_s(pid) for pid in self._pids]


def _waited_s(pid: int) -> float:
    """Of the main thread, which is the one with the event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
