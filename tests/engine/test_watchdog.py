"""A process without progress ends, with tracebacks; one that works or rests lives on."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_PROGRAM = """
import ctypes, itertools, sys, threading, time
from engine.watchdog import Watchdog

moving = itertools.count()
def beats(kind):
    return {{"engine": lambda: next(moving) if kind != "hung engine" else 1, "loop": lambda: next(moving) if kind != "hung loop" else 1}}
kind = {kind!r}
table = beats(kind)
if kind == "idle engine":
    table["engine"] = lambda: None
watchdog = Watchdog(0.5, table)
watchdog.start()
if kind == "held GIL":
    ctypes.PyDLL(None).sleep(30)
threading.Event().wait(30 if kind.startswith("hung") else 2)
watchdog.stop()
time.sleep(0.7)
print("alive")
"""


def run(kind: str) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(_PROGRAM).format(kind=kind)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)


@pytest.mark.parametrize("kind", ["hung engine", "hung loop", "held GIL"])
def test_a_stall_ends_the_process_with_tracebacks(kind: str) -> None:
    result = run(kind)
    assert result.returncode == 1
    assert "Timeout (0:00:00.5" in result.stderr
    assert "alive" not in result.stdout


@pytest.mark.parametrize("kind", ["working", "idle engine"])
def test_progress_and_rest_keep_it_alive(kind: str) -> None:
    result = run(kind)
    assert (result.returncode, result.stdout) == (0, "alive\n")
