"""What a piece of work takes at its peak is what it allocated, and a control group's limit counts where it is the narrower one."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import host_memory
from engine.host_memory import available_memory_bytes, peak_memory_bytes

_MIB = 1 << 20
_SLACK = 12 * _MIB


def test_the_peak_is_that_of_this_work_and_not_of_earlier_work() -> None:
    peaks = [peak_memory_bytes(lambda size=size: bytearray(size * _MIB)) for size in (256, 64, 0)]  # type: ignore[misc] # the default binds the size
    for peak, size in zip(peaks, (256, 64, 0), strict=True):
        assert size * _MIB - _SLACK <= peak <= size * _MIB + _SLACK, peaks


def test_memory_freed_before_the_work_does_not_hide_what_it_takes() -> None:
    def many() -> int:
        return sum(map(len, [bytes(60_000) for _ in range(1000)]))  # below malloc's mmap threshold: kept by malloc when freed

    assert many() == 60_000_000
    assert peak_memory_bytes(many) >= 40 * _MIB


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path, text in {
        "proc/meminfo": "MemTotal:       100 kB\nMemAvailable:      50 kB\n",
        "proc/self/cgroup": "9:name=systemd:/\n0::/pod/worker\n",
        "cgroup/pod/worker/memory.current": "30000\n",
        "cgroup/pod/worker/memory.stat": "anon 20000\ninactive_file 4000\n",
        "cgroup/pod/worker/memory.max": "40000\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path / "cgroup")
    return tmp_path / "cgroup/pod/worker"


@pytest.mark.parametrize(("limit", "available"), [("40000", 14_000), ("80000", 50 * 1024), ("max", 50 * 1024), ("20000", 0)])
def test_the_narrower_of_machine_and_control_group_counts(machine: Path, limit: str, available: int) -> None:
    (machine / "memory.max").write_text(f"{limit}\n")
    assert available_memory_bytes() == available


def test_without_a_control_group_the_machine_counts(machine: Path) -> None:
    (machine / "memory.max").unlink()
    assert available_memory_bytes() == 50 * 1024


def test_this_machine_has_memory() -> None:
    assert available_memory_bytes() > 100 * _MIB
