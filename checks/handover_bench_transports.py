"""Every transport between two processes of one core each: bytes a second, CPU seconds a byte, and how long a small hand-over takes."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import uvloop

from checks.handover_bench_decode import DecodeEnd, Latency, Moved, PairWish, open_end
from checks.handover_bench_machine import MIB, MemoryCopy, pin
from checks.handover_bench_pool import LLAMA_8B, SyntheticPool
from checks.handover_bench_process import NIXL_OVER_TCP
from checks.handover_bench_source import PrefillProcess, PrefillWish, running_prefill
from decode_svc.pairing_attempt import NotPairedError
from engine.host_memory import available_memory_bytes
from kvtransfer.nixl_settings import NixlSettings
from rpc.process import keep_freed_memory

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


@dataclass(frozen=True, slots=True)
class Plan:
    """What one decode process measures. UCX's settings are a process's: nixl in two ways takes two."""

    ways: Mapping[str, str]
    """Transports by the name that the rows have."""
    effort: Effort
    nixl: NixlSettings


FULL = Effort(((1, CONCURRENT), (GOAL_MIB, CONCURRENT), (512, CONCURRENT)), num_rounds=9, cell_s=3.0, num_small=200)
QUICK = Effort(((1, (1, 8)), (GOAL_MIB, (1, 8)), (512, (1,))), num_rounds=5, cell_s=0.3, num_small=40)


FEW = replace(FULL, sizes=((GOAL_MIB, (1,)), (512, (1,))))


def plans(*, short: bool) -> list[Plan]:
    """All of a run. NIXL writes over TCP of the loopback interface, and in a full run reads by what UCX finds between two processes of a host."""
    ways = {name: name for name in ("shared_memory", "nixl", "inline")}
    first = Plan(ways, QUICK if short else FULL, NIXL_OVER_TCP)
    return [first, *([] if short else [Plan({"nixl_read": "nixl"}, FEW, NixlSettings("lo", "", "read"))])]


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
    def rate(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.gb_per_s)


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

    def memcpy(self, num_mib: int) -> list[float]:
        """All rounds of memcpy of so many bytes: by which transport's they were does not matter to it, and more of them are harder to disturb."""
        return [rate for cell in self.cells if cell.mib * cell.concurrent == num_mib for rate in cell.memcpy_gb_per_s]

    def ratio(self, cell: Cell) -> float:
        """Of a cell's rate to memcpy of as many bytes, medians of this run."""
        return cell.rate / statistics.median(self.memcpy(cell.mib * cell.concurrent))

    def row(self, cell: Cell) -> dict[str, object]:
        """A cell for the file."""
        memcpy = self.memcpy(cell.mib * cell.concurrent)
        return {
            "transport": cell.transport,
            "mib": cell.mib,
            "concurrent": cell.concurrent,
            "checksum": cell.checksum,
            "rounds": len(cell.gb_per_s),
            "gb_per_s": round(cell.rate, 3),
            "best_gb_per_s": round(max(cell.gb_per_s), 3),
            "memcpy_gb_per_s": round(statistics.median(memcpy), 3),
            "best_memcpy_gb_per_s": round(max(memcpy), 3),
            "ratio": round(self.ratio(cell), 3),
            "ratio_to_fastest": round(cell.rate / self.fastest_memcpy, 3),
            "decode_cpu_s_per_gb": round(cell.decode_cpu_s / cell.num_bytes * 1e9, 4),
            "prefill_cpu_s_per_gb": round(cell.prefill_cpu_s / cell.num_bytes * 1e9, 4),
        }

    @property
    def fastest_memcpy(self) -> float:
        """The best median of memcpy among the numbers of bytes that no cache holds."""
        sizes = {cell.mib * cell.concurrent for cell in self.cells}
        return max(statistics.median(self.memcpy(size)) for size in sizes if size >= GOAL_MIB or max(sizes) < GOAL_MIB)

    @property
    def transports(self) -> list[str]:
        """Those that were measured."""
        return list(dict.fromkeys(cell.transport for cell in self.cells))

    def add(self, other: Measured) -> None:
        """Adds what another process measured."""
        self.cells += other.cells
        self.left_out += other.left_out
        for own, others in ((self.small, other.small), (self.pairing_s, other.pairing_s), (self.unavailable, other.unavailable)):
            cast(dict[str, object], own).update(cast(dict[str, object], others))


def run(plan: Plan, own_core: int, prefill_core: int, socket_dir: Path) -> Measured:
    """Measures in this process, which should be a new one: it is pinned, and set up as a worker is."""
    pin([own_core])
    memory = MemoryCopy(512 * MIB)
    keep_freed_memory()
    sys.setswitchinterval(0.0005)
    return uvloop.run(TransportBench(plan, memory, socket_dir).run(prefill_core))


def run_in_child(plan: Plan, own_core: int, prefill_core: int, socket_dir: Path) -> Measured:
    """The same in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as child:
        return child.submit(run, plan, own_core, prefill_core, socket_dir).result()


class TransportBench:
    """Measures transports one behind the other."""

    def __init__(self, plan: Plan, memory: MemoryCopy, socket_dir: Path) -> None:
        self._plan = plan
        self._effort = plan.effort
        self._socket_dir = socket_dir
        self._memory = memory
        self.measured = Measured()

    async def run(self, prefill_core: int) -> Measured:
        """All sizes, smallest blocks first."""
        for layout in (HALF_BLOCKS, LLAMA_8B):
            sizes = [(mib, counts) for mib, counts in self._effort.sizes if (mib * MIB < LLAMA_8B.block_bytes) == (layout is HALF_BLOCKS)]
            if not sizes:
                continue
            most_mib = max(mib * count for mib, counts in sizes for count in counts)
            num_blocks = min(max(most_mib, 256) * MIB, available_memory_bytes() // 3) // layout.block_bytes
            wish = PrefillWish(layout, num_blocks, (prefill_core,), self._socket_dir, nixl=self._plan.nixl)
            async with running_prefill(wish) as prefill:
                with closing(SyntheticPool(layout, num_blocks)) as pool:
                    for name in self._plan.ways:
                        await self._measure(prefill, pool, name, sizes)
        return self.measured

    async def _measure(self, prefill: PrefillProcess, pool: SyntheticPool, name: str, sizes: Sequence[tuple[int, Sequence[int]]]) -> None:
        try:
            async with open_end(pool, prefill, self._wish(name)) as (end, pairing_s):
                await end.verify(min(32, pool.kv_cache.num_blocks))
                self.measured.pairing_s[name] = pairing_s
                for mib, counts in sizes:
                    for count in counts:
                        await self._cell(pool, end, Cell(name, mib, count, checksum=False))
                if pool.kv_cache.layout == LLAMA_8B:
                    self.measured.small[name] = [await end.move_one() for _ in range(self._effort.num_small)]
            if pool.kv_cache.layout == LLAMA_8B:
                async with open_end(pool, prefill, self._wish(name, checksum=True)) as (end, _):
                    await end.verify(32)
                    await self._cell(pool, end, Cell(name, GOAL_MIB, 1, checksum=True))
        except NotPairedError as error:
            self.measured.unavailable[name] = str(error)

    def _wish(self, name: str, *, checksum: bool = False) -> PairWish:
        return PairWish(self._plan.ways[name], checksum, self._socket_dir, self._plan.nixl)

    async def _cell(self, pool: SyntheticPool, end: DecodeEnd, cell: Cell) -> None:
        cache = pool.kv_cache
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
