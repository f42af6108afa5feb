"""One HTML file that holds everything about one run, several side by side, or a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.cost import Price
from bench.goodput import Limits
from bench.run import Run
from bench.sweep import Sweep


def write_report(
    path: Path, runs: Sequence[Run], sweep: Sweep | None = None, *, limits: Sequence[Limits] = (), price: Price | None = None, title: str = ""
) -> Path:
    """Writes it and returns its path. `runs` may be empty when there is a sweep: its probes' runs are not repeated there.

    Nothing in the file is loaded from elsewhere. Raises ValueError when there is nothing to report.
    """
    raise NotImplementedError
