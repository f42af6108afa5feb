"""What the readings of all rounds say: medians, ratios of pairs, fractions of the machine's limit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from checks.peers_cells import EIGHT, Cell, Reading
from checks.peers_floor import Floor, measured_s

TANDEM, VLLM, GRPC, TRANSFORMERS = "tandem", "vllm", "tandem over gRPC", "transformers"
MIN_OVER_TRANSFORMERS = 4.0
"""Of output tokens a second, at 8 streams."""
MAX_OVER_FLOOR = 1.25
"""Of the time of the cell with 32 streams."""


@dataclass(frozen=True, slots=True)
class Series:
    """One figure over the rounds."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def row(self) -> dict[str, Any]:
        """For a file; NaN as null."""
        values = [None if math.isnan(value) else round(value, 4) for value in self.values]
        there = [value for value in self.values if not math.isnan(value)]
        known = {name: round(of(there), 4) if there else None for name, of in (("median", statistics.median), ("min", min), ("max", max))}
        return {**known, "rounds": values}


@dataclass(slots=True)
class Results:
    """Readings by cell and server, one for each round."""

    readings: dict[tuple[str, str], list[Reading]] = field(default_factory=dict)
    transformers: list[float] = field(default_factory=list)
    """Output tokens a second."""

    def add(self, cell: Cell, server: str, reading: Reading) -> None:
        """The next round's."""
        self.readings.setdefault((cell.name, server), []).append(reading)

    def figures(self, cell: Cell, server: str) -> Series:
        """That are compared."""
        return Series([getattr(each, cell.figure) for each in self.readings[cell.name, server]])

    def ratios(self, cell: Cell) -> Series:
        """Tandem over vLLM, of each round's pair."""
        pairs = zip(self.figures(cell, TANDEM).values, self.figures(cell, VLLM).values, strict=True)
        return Series([one / other for one, other in pairs])

    def over_transformers(self) -> Series:
        """Tandem over transformers at 8 streams, of each round's pair."""
        return Series([one / other for one, other in zip(self.figures(EIGHT, TANDEM).values, self.transformers, strict=True)])

    def took_s(self, cell: Cell, server: str) -> Series:
        """What the floor is the least of."""
        return Series([measured_s(cell, each) for each in self.readings[cell.name, server]])

    def row(self, cell: Cell, floor: Floor) -> dict[str, Any]:
        """All of a cell, for a file, the tables and the plot."""
        servers = [server for name, server in self.readings if name == cell.name]
        return {
            "name": cell.name,
            "load": f"{cell.num_requests} requests of {cell.prompt_tokens} in, {cell.output_tokens} out, {cell.concurrency} at a time",
            "concurrency": cell.concurrency,
            "figure": cell.figure,
            "goal": cell.goal,
            "servers": {server: self._server_row(cell, server) for server in servers},
            "ratio": self.ratios(cell).row(),
            "floor": floor.row(),
            "of_limit": {server: round(floor.figure_s / self.took_s(cell, server).median, 4) for server in servers},
        }

    def _server_row(self, cell: Cell, server: str) -> Mapping[str, Any]:
        rows = [each.row() for each in self.readings[cell.name, server]]
        return {name: Series([row[name] for row in rows]).row() for name in rows[0]}
