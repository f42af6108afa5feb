"""Every transport between two processes of one core each: bytes a second, CPU seconds a byte, and how long a small hand-over takes."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from checks.handover_bench_decode import DecodeEnd, Latency, Moved, PairWish, open_end
from checks.handover_bench_machine import MIB, MemoryCopy
from checks.handover_bench_pool import LLAMA_8B, SyntheticPool
from checks.handover_bench_source import PrefillProcess, PrefillWish, running_prefill
from checks.verdict import quick
from decode_svc.pairing_attempt import NotPairedError
from engine.host_memory import available_memory_bytes
from engine.kv_cache import KvLayout

GOAL_MIB = 64
"""Where goals are held against memcpy, one hand-over at a time."""
CONCURRENT = (1, 2, 4, 8)
HALF_BLOCKS = replace(LLAMA_8B, block_size=8)
"""Blocks of 1 MiB: in a pool with blocks of 2 MiB there is no smaller hand-over."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    sizes: Sequence[tuple[int, Sequence[int]]]
    """MiB of one hand-over, and how many at the same time."""
    num_rounds: int
    cell_s: float
    """Rounds end early once a cell has taken this long; it has two at least."""
    num_small: int
    """Hand-overs of one block."""


FULL = Effort(((1, CONCURRENT), (GOAL_MIB, CONCURRENT), (512, CONCURRENT)), num_rounds=9, cell_s=3.0, num_small=200)
QUICK = Effort(((1, (1, 8)), (GOAL_MIB, CONCURRENT), (512, (1,))), num_rounds=5, cell_s=0.35, num_small=40)


@dataclass
class Cell:
    """One transport at one size, so many at the same time. Rates are 10^9 bytes a second, all hand-overs together."""

    transport: str
    mib: int
    concurrent: int
    checksum: bool
    gb_per_s: list[float] = field(default_factory=list)
    memcpy_gb_per_s: list[float] = field(default_factory=list)
    """Of as many bytes, one thread, in turn with the hand-overs."""
    decode_cpu_s: float = 0.0
    prefill_cpu_s: float = 0.0
    num_bytes: int = 0

    def add(self, moved: Moved, memcpy_s: float) -> None:
        """One round."""
        self.gb_per_s.append(moved.gb_per_s)
        self.memcpy_gb_per_s.append(moved.num_bytes / memcpy_s / 1e9)
        self.decode_cpu_s += moved.decode_cpu_s
        self.prefill_cpu_s += moved.prefill_cpu_s
        self.num_bytes += moved.num_bytes

    @property
    def ratio(self) -> float:
        """To memcpy: the median of the rounds."""
        return statistics.median(own / memcpy for own, memcpy in zip(self.gb_per_s, self.memcpy_gb_per_s, strict=True))

    def row(self) -> dict[str, object]:
        """For the file."""
        return {
            "transport": self.transport,
            "mib": self.mib,
            "concurrent": self.concurrent,
            "checksum": self.checksum,
            "rounds": len(self.gb_per_s),
            "gb_per_s": round(statistics.median(self.gb_per_s), 3),
            "best_gb_per_s": round(max(self.gb_per_s), 3),
            "memcpy_gb_per_s": round(statistics.median(self.memcpy_gb_per_s), 3),
            "best_memcpy_gb_per_s": round(max(self.memcpy_gb_per_s), 3),
            "ratio": round(self.ratio, 3),
            "decode_cpu_s_per_gb": round(self.decode_cpu_s / self.num_bytes * 1e9, 4),
            "prefill_cpu_s_per_gb": round(self.prefill_cpu_s / self.num_bytes * 1e9, 4),
        }


@dataclass
class Measured:
    """What all transports gave."""

    cells: list[Cell] = field(default_factory=list)
    small: dict[str, list[Latency]] = field(default_factory=dict)
    """Hand-overs of one block of 2 MiB."""
    pairing_s: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    """Why a transport was not measured."""
    left_out: list[str] = field(default_factory=list)
    """Sizes for which there was no memory."""

    def cell(self, transport: str, mib: int = GOAL_MIB, concurrent: int = 1, *, checksum: bool = False) -> Cell | None:
        """One cell, if it was measured."""
        wanted = (transport, mib, concurrent, checksum)
        return next((cell for cell in self.cells if (cell.transport, cell.mib, cell.concurrent, cell.checksum) == wanted), None)

    @property
    def transports(self) -> list[str]:
        """Those that were measured."""
        return list(dict.fromkeys(cell.transport for cell in self.cells))

    def memcpy_samples(self) -> list[float]:
        """All copies of 64 MiB and as many bytes at a time."""
        return [rate for cell in self.cells if cell.mib == GOAL_MIB and cell.concurrent == 1 for rate in cell.memcpy_gb_per_s]


@dataclass(frozen=True, slots=True)
class Ends:
    """Two pools of one layout in two processes."""

    prefill: PrefillProcess
    pool: SyntheticPool
    socket_dir: Path


@asynccontextmanager
async def open_ends(layout: KvLayout, num_blocks: int, prefill_core: int, socket_dir: Path) -> AsyncIterator[Ends]:
    """Starts the prefill process and makes this process's pool."""
    async with running_prefill(PrefillWish(layout, num_blocks, (prefill_core,), socket_dir)) as prefill:
        pool = SyntheticPool(layout, num_blocks)
        try:
            yield Ends(prefill, pool, socket_dir)
        finally:
            pool.close()


class TransportBench:
    """Measures transports one behind the other. Whoever runs it has pinned this process to a core of its own."""

    def __init__(self, effort: Effort, transports: Sequence[str]) -> None:
        self._effort = effort
        self._transports = transports
        self._memory = MemoryCopy(512 * MIB)
        self.measured = Measured()

    async def run(self, prefill_core: int, socket_dir: Path) -> Measured:
        """All sizes, smallest blocks first."""
        for layout in (HALF_BLOCKS, LLAMA_8B):
            sizes = [(mib, counts) for mib, counts in self._effort.sizes if (mib * MIB < LLAMA_8B.block_bytes) == (layout is HALF_BLOCKS)]
            most_mib = max(mib * count for mib, counts in sizes for count in counts)
            num_blocks = min(max(most_mib, 256) * MIB, available_memory_bytes() // 3) // layout.block_bytes
            async with open_ends(layout, num_blocks, prefill_core, socket_dir) as ends:
                for transport in self._transports:
                    await self._measure(ends, transport, sizes)
        return self.measured

    async def _measure(self, ends: Ends, transport: str, sizes: Sequence[tuple[int, Sequence[int]]]) -> None:
        try:
            async with open_end(ends.pool, ends.prefill, PairWish(transport, socket_dir=ends.socket_dir)) as (end, pairing_s):
                await end.verify(min(32, ends.pool.kv_cache.num_blocks))
                self.measured.pairing_s[transport] = pairing_s
                for mib, counts in sizes:
                    for count in counts:
                        await self._cell(ends, end, Cell(transport, mib, count, checksum=False))
                if ends.pool.kv_cache.layout == LLAMA_8B:
                    self.measured.small[transport] = [await end.move_one() for _ in range(self._effort.num_small)]
                    await self._with_checksum(ends, transport)
        except NotPairedError as error:
            self.measured.unavailable[transport] = str(error)

    async def _with_checksum(self, ends: Ends, transport: str) -> None:
        async with open_end(ends.pool, ends.prefill, PairWish(transport, True, ends.socket_dir)) as (end, _):
            await end.verify(32)
            await self._cell(ends, end, Cell(transport, GOAL_MIB, 1, checksum=True))

    async def _cell(self, ends: Ends, end: DecodeEnd, cell: Cell) -> None:
        cache = ends.pool.kv_cache
        num_blocks = cell.mib * MIB // cache.layout.block_bytes
        if num_blocks * cell.concurrent > cache.num_blocks:
            self.measured.left_out.append(f"{cell.concurrent} x {cell.mib} MiB by {cell.transport}: no memory for two pools of that size")
            return
        started, num_bytes = time.monotonic(), cell.mib * cell.concurrent * MIB
        rounds = self._effort.num_rounds * (4 if cell.mib < GOAL_MIB else 1)
        while len(cell.gb_per_s) < rounds and (len(cell.gb_per_s) < 2 or time.monotonic() - started < self._effort.cell_s):
            memcpy_s = self._memory.run(num_bytes)
            cell.add(await end.move(num_blocks, cell.concurrent), memcpy_s)
        self.measured.cells.append(cell)


def percentile_ms(samples: Sequence[float], share: float) -> float:
    """In ms, of samples in seconds."""
    return sorted(samples)[min(len(samples) - 1, math.ceil(share * len(samples)) - 1)] * 1e3


def small_rows(measured: Measured) -> list[dict[str, object]]:
    """For the file: hand-overs of one block."""
    rows: list[dict[str, object]] = []
    for transport, latencies in measured.small.items():
        row: dict[str, object] = {"transport": transport, "mib": 2, "hand_overs": len(latencies)}
        for name, samples in (("whole", [one.whole_s for one in latencies]), ("read", [one.read_s for one in latencies])):
            row |= {f"{name}_p50_ms": round(percentile_ms(samples, 0.5), 3), f"{name}_p99_ms": round(percentile_ms(samples, 0.99), 3)}
        rows.append(row)
    return rows


def effort() -> Effort:
    """How much this run measures."""
    return QUICK if quick() else FULL


logging.getLogger("kvtransfer").setLevel(logging.WARNING)
