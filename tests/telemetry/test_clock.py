from __future__ import annotations

import time

import pytest

from telemetry.clock import WallClock


def test_wall_clock_is_measured_anew_when_old(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WallClock()
    first_ns = clock.offset_ns()
    step_ns = 3_600_000_000_000
    real_time_ns, real_monotonic_ns = time.time_ns, time.monotonic_ns
    monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + step_ns)

    assert clock.offset_ns() == first_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: real_monotonic_ns() + 31_000_000_000)
    monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + step_ns + 31_000_000_000)
    assert abs(clock.offset_ns() - first_ns - step_ns) < 50_000_000
