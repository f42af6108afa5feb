"""What the host has for this process, and what a piece of work takes of it at its peak. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
from collections.abc import Callable
from pathlib import Path

_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_RESET_PEAK = "5"


def available_memory_bytes() -> int:
    """What can be allocated without swapping: MemAvailable, or what the process's control group (version 2) has left if that is less."""
    available = _kib((_PROC / "meminfo").read_text(), "MemAvailable") * 1024
    left = _control_group_left(_CGROUP / _control_group())
    return available if left is None else min(available, left)


def peak_memory_bytes(work: Callable[[], object]) -> int:
    """How far resident memory rises above its present size while `work` runs; the kernel notes the peak itself.

    Freed memory that malloc keeps would hide a part of the rise: glibc is told to give it back first. Other threads of the process count too, so it is for
    the time before it serves. Where the kernel cannot forget an earlier peak, that one is told: more than was taken, never less.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    before = _kib(_status(), "VmRSS")
    with contextlib.suppress(OSError):  # told above: the peak of the whole life stands in
        (_PROC / "self/clear_refs").write_text(_RESET_PEAK)
    work()
    return max(0, _kib(_status(), "VmHWM") - before) * 1024


def _status() -> str:
    return (_PROC / "self/status").read_text()


def _kib(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the kernel tells no {name}")
    return int(found[1])


def _control_group() -> str:
    """Path of the process's own group in the unified hierarchy, relative; empty where there is none."""
    for line in (_PROC / "self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::").strip("/")
    return ""


def _control_group_left(group: Path) -> int | None:
    """Bytes up to the group's limit, file pages that can be dropped counted as free; None without a limit."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        current = int((group / "memory.current").read_text())
        droppable = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except FileNotFoundError:
        return None  # the root group, or a kernel without the unified hierarchy
    return max(0, int(limit) - current + (int(droppable[1]) if droppable else 0))
