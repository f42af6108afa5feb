"""A process without progress ends, with tracebacks that say where; one that works, rests or warms up lives on.

Each case is a process of its own: a decode worker over an engine whose device computes nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_MAX_STALL_S = 1.0
_BOUND_S = 3.0
"""From the stall to the exit: the timer, two looks of the watchdog, and what writing tracebacks takes on a busy machine."""


@contextmanager
def _worker(kind: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.stalling_worker", kind, str(_MAX_STALL_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("kind", "frame", "named"),
    [
        ("hung kernel", "hang_in_kernel", "no progress of engine:"),
        ("hung kernel at the end", "hang_in_kernel", "no progress of engine:"),
        ("hung loop", "hang_the_loop", "no progress of loop:"),
        ("held GIL", "hold_the_gil", None),
        ("endless match", "match_without_end", None),
    ],
)
def test_a_stall_ends_the_process_and_names_the_place(kind: str, frame: str, named: str | None) -> None:
    with _worker(kind) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stalls\n"
        stalled_s = time.monotonic()
        rest, errors = process.communicate(timeout=20)
        assert time.monotonic() - stalled_s < _MAX_STALL_S + _BOUND_S
    assert (process.returncode, rest) == (1, "")
    assert "Timeout (0:00:01)!" in errors
    assert f"in {frame}" in errors
    assert named is None or named in errors


@pytest.mark.parametrize("kind", ["slow warm-up", "idle", "long load"])
def test_a_worker_that_warms_up_rests_or_goes_on_is_left_alone(kind: str) -> None:
    with _worker(kind) as process:
        rest, errors = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "alive\n"), errors
