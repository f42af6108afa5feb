"""The form in which every check, benchmark and demo ends: one line, and a JSON file with what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Verdict(Enum):
    """OK: the goal was met. SHORT: it was missed. VOID: the run cannot be trusted."""

    OK = 0
    SHORT = 1
    VOID = 2


@dataclass(frozen=True, slots=True)
class Report:
    """What a target measured."""

    target: str
    verdict: Verdict
    values: Mapping[str, int | float | str]
    """What the last line says."""
    details: Mapping[str, object]
    """What only the file says."""

    def line(self) -> str:
        """The last line."""
        return " ".join([self.verdict.name, self.target, *(f"{key}={value}" for key, value in self.values.items())])

    def write(self, directory: Path) -> Path:
        """Writes `<target>.json` into `directory` and returns its path."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.target}.json"
        content = {"target": self.target, "verdict": self.verdict.name, **self.values, **self.details}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        return path
