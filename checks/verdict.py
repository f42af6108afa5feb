"""How every check begins and ends (design 8)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from cli.report import Report, Verdict


def quick() -> bool:
    """QUICK=1: the same things on less, in under 50 seconds."""
    return os.environ.get("QUICK") == "1"


@dataclass
class Check:
    """One run of one target."""

    target: str
    goals_missed: list[str] = field(default_factory=list)
    details: dict[str, object] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    def begin(self, what: str, *, seconds: int, quick_seconds: int) -> None:
        """Says what is done and how long it takes."""
        print(f"{self.target}: {what}; takes about {quick_seconds if quick() else seconds} s{' (QUICK)' if quick() else ''}", flush=True)

    def goal(self, met: bool, text: str) -> None:
        """Records a goal; a missed one makes the verdict SHORT."""
        if not met:
            self.goals_missed.append(text)
            print(f"  missed: {text}", flush=True)

    def void(self, reason: str) -> NoReturn:
        """The run cannot be trusted."""
        print(f"  {reason}", flush=True)
        self._end(Verdict.VOID, {})

    def end(self, values: Mapping[str, int | float | str]) -> NoReturn:
        """Writes the file, prints the verdict and exits with its code."""
        self._end(Verdict.SHORT if self.goals_missed else Verdict.OK, values)

    def _end(self, verdict: Verdict, values: Mapping[str, int | float | str]) -> NoReturn:
        details = {"quick": quick(), "seconds": round(time.monotonic() - self._started, 1), "goals_missed": self.goals_missed, **self.details}
        report = Report(self.target, verdict, values, details)
        report.write(Path("out"))
        print(report.line(), flush=True)
        sys.exit(verdict.value)
