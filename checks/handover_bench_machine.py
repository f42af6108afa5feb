"""What a benchmark has to know of the machine under it: its cores, the speed of its memory, and who else is at work."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

from engine.host_memory import available_memory_bytes

MIB = 1 << 20
_HALF_PAGE = 2048
MAX_OTHERS_SHARE = 0.15
"""Of all cores: more than this taken by others, and the run is void."""
MAX_SPREAD = 0.3
"""Most width of the middle half of the copies of 64 MiB, in parts of their median."""


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def pin(to: Iterable[int]) -> None:
    """Confines all threads that the process has now, and those that they start, to these cores."""
    wanted = set(to)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), wanted)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the numbers were measured on: its kind, never its name."""

    num_cores: int
    memory_gib: float
    kernel: str

    @classmethod
    def here(cls) -> Machine:
        """This one."""
        return cls(len(cores()), round(psutil.virtual_memory().total / (1 << 30), 1), os.uname().release.split("-")[0])

    def __str__(self) -> str:
        return f"{self.num_cores} cores, {self.memory_gib:g} GiB of memory, Linux {self.kernel}"


class MemoryCopy:
    """One thread's np.copyto between two touched arrays, from one place to the next so that no round finds the last one's bytes in the cache.

    As fast as it gets: in arrays that numpy has in huge pages of its own (so make it before `keep_freed_memory`), which lie half a page apart, since a copy
    to the same place of a page is up to a third slower.
    """

    def __init__(self, num_bytes: int) -> None:
        num_bytes = min(num_bytes, available_memory_bytes() // 8)
        self._source = np.ones(num_bytes, np.uint8)
        self._destination = np.ones(num_bytes + _HALF_PAGE, np.uint8)[_HALF_PAGE:]
        self._next = 0

    def run(self, num_bytes: int) -> float:
        """Copies this many bytes; returns the seconds it took."""
        elapsed_s, left = 0.0, num_bytes
        while left:
            part = min(left, len(self._source))
            if self._next + part > len(self._source):
                self._next = 0
            place = slice(self._next, self._next + part)
            started = time.perf_counter()
            np.copyto(self._destination[place], self._source[place])
            elapsed_s += time.perf_counter() - started
            self._next += part
            left -= part
        return elapsed_s


def spread(samples: Sequence[float]) -> float:
    """The width of their middle half, in parts of the median."""
    if len(samples) < 2:
        return 0.0
    quarters = statistics.quantiles(samples, n=4)
    return (quarters[-1] - quarters[0]) / statistics.median(samples)


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, of all threads that it has or had, to the nanosecond."""
    # clock_getcpuclockid(3), which Python lacks: the process's own clock of the scheduler.
    return time.clock_gettime((~pid << 3) | 2)


def _busy_s() -> float:
    """CPU seconds of the whole machine so far, what its host took included."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))


def _own_s() -> float:
    """CPU seconds so far of this process, of those it started, and of those of them that have ended."""
    ended = os.times()
    total = ended.user + ended.system + ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            total += process_cpu_s(child.pid)
        except OSError:  # it has just ended
            continue
    return total


@dataclass
class Others:
    """Watches how much of the machine's cores goes to processes that are not this run's."""

    shares: dict[str, float] = field(default_factory=dict)
    """By the part of the run."""
    elapsed_s: dict[str, float] = field(default_factory=dict)
    """How long each part took."""
    _since: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def begin(self) -> None:
        """From here on."""
        self._since = time.monotonic(), _busy_s(), _own_s()

    def end(self, part: str) -> float:
        """Until here; returns the share, 1 being all cores."""
        wall, busy, own = (now - then for now, then in zip((time.monotonic(), _busy_s(), _own_s()), self._since, strict=True))
        self.elapsed_s[part] = round(wall, 1)
        share = max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))
        self.shares[part] = round(share, 3)
        return share
