"""`make bench-handover`: every transport against memcpy, the control path, the overlap with compute, and what running streams feel.

One core for each process of a hand-over: prefill has the first, decode the second one. `--markdown` prints the last run's tables, `--update` puts them
into a document.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from rich.console import Console

from checks import handover_bench_control as control
from checks import handover_bench_overlap as overlap
from checks import handover_bench_tpot as tpot
from checks import handover_bench_transports as transports
from checks.handover_bench_machine import MAX_OTHERS_SHARE, MAX_SPREAD, Machine, Others, cores, spread
from checks.handover_bench_plot import plot
from checks.handover_bench_report import TARGET, markdown, tables, updated
from checks.handover_bench_served import running_workers
from checks.verdict import Check, quick

_NOT_HERE = {"cuda_ipc": "not here: there is no GPU"}
_GOALS = {"shared_memory": 0.85, "inline": 0.15, "nixl": 0.25}
"""Of memcpy, at 64 MiB."""
_MAX_CONTROL_MS = 1.0
_MAX_TPOT_RATIO = 1.1
_LOGS = Path("out")
_T = TypeVar("_T")


class Bench:
    """One run. Its parts go into `check.details` as they are measured, so that a run that is void still tells what it found."""

    def __init__(self, check: Check, model: Path, socket_dir: Path) -> None:
        self._check = check
        self._model = model
        self._socket_dir = socket_dir
        self._cores = cores()
        self._others = Others()
        self.usable: list[str] = []
        """Transports that this machine has, the fastest first."""
        check.details |= {"machine": asdict(Machine.here()), "others_share": self._others.shares, "part_s": self._others.elapsed_s}

    def run(self) -> dict[str, int | float | str]:
        """All parts; what the last line says."""
        for log in _LOGS.glob(f"{TARGET}-*.log"):
            log.unlink()
        if len(self._cores) < 2:
            self._check.void("one core only: a hand-over needs one for each of its two processes")
        measured = self._transports()
        self.usable = measured.transports
        paths = [self._part(f"control path, {name}", control.measure(name, self._cores, self._socket_dir, self._log("control"))) for name in self._shown()]
        self._check.details["control_path"] = [path.row() for path in paths]
        served = [self._part(f"overlap and running streams, {name}", self._serve(name)) for name in self._shown()]
        overlaps, tpots = [each for each, _ in served], [each for _, each in served]
        self._check.details |= {"overlap": [each.row() for each in overlaps], "tpot": [each.row() for each in tpots]}
        self._judge(measured, paths[0], tpots[0])
        return {
            **{f"{name}_of_memcpy": round(measured.ratio(cell), 2) for name in self.usable if (cell := measured.cell(name))},
            "control_ms": round(paths[0].control_ms, 2),
            "control_own_ms": round(paths[0].own_ms, 2),
            "hidden": round(overlaps[0].hidden_share, 2),
            "tpot_ratio": round(tpots[0].ratio("second_s"), 2),
            "gap_ratio": round(tpots[0].ratio("during_s"), 2),
        }

    async def _serve(self, transport: str) -> tuple[overlap.Overlap, tpot.Tpot]:
        async with running_workers(self._model, transport, self._cores, self._socket_dir, self._log("served")) as served:
            return await overlap.measure(served, self._model, self._cores), await tpot.measure(served, self._model)

    def _shown(self) -> list[str]:
        """Transports of the parts that start whole workers: the one that decode would choose, and in a full run the one that always works."""
        return list(dict.fromkeys([self.usable[0], *([] if quick() else ["inline"])]))

    def _transports(self) -> transports.Measured:
        measured = transports.Measured()
        for plan in transports.plans(short=quick()):
            work = partial(transports.run_in_child, plan, self._cores[1], self._cores[0], self._socket_dir)
            measured.add(self._timed(f"transports: {', '.join(plan.ways)}", work))
        measured.unavailable |= _NOT_HERE
        if not measured.cells:
            self._check.void("no transport could be measured")
        self._check.details |= {
            "transports": [measured.row(cell) for cell in measured.cells],
            "small": transports.small_rows(measured),
            "pairing_ms": {name: round(elapsed_s * 1e3, 2) for name, elapsed_s in measured.pairing_s.items()},
            "unavailable": measured.unavailable,
            "left_out": measured.left_out,
            "memcpy_spread": round(spread(measured.memcpy(transports.GOAL_MIB)), 3),
        }
        return measured

    def _part(self, name: str, work: Coroutine[Any, Any, _T]) -> _T:
        return self._timed(name, lambda: uvloop.run(work))

    def _timed(self, name: str, work: Callable[[], _T]) -> _T:
        print(f"  {name}", flush=True)
        self._others.begin()
        result = work()
        self._others.end(name)
        return result

    def _log(self, part: str) -> Path:
        _LOGS.mkdir(exist_ok=True)
        return _LOGS / f"{TARGET}-{part}.log"

    def _judge(self, measured: transports.Measured, path: control.ControlPath, streams: tpot.Tpot) -> None:
        for name, least in _GOALS.items():
            cell = measured.cell(name)
            if cell is not None:
                ratio = measured.ratio(cell)
                self._check.goal(ratio >= least, f"{name} moves {ratio:.2f} of memcpy at {cell.mib} MiB, at least {least} is asked for")
        own = f"the control path takes {path.own_ms:.2f} ms beyond a bare gRPC conversation of {path.bare_s * 1e3:.2f} ms"
        self._check.goal(path.own_ms <= _MAX_CONTROL_MS, f"{own}, at most {_MAX_CONTROL_MS:g} is asked for")
        ratio = streams.ratio("second_s")
        self._check.goal(ratio <= _MAX_TPOT_RATIO, f"TPOT in the second of a hand-over is {ratio:.2f} of the control, at most {_MAX_TPOT_RATIO:g} is asked for")

    def distrust(self) -> str:
        """Why the numbers cannot be trusted; empty when they can."""
        busy = {name: share for name, share in self._others.shares.items() if share > MAX_OTHERS_SHARE}
        if busy:
            return "others took " + ", ".join(f"{share:.0%} of the cores in {name!r}" for name, share in busy.items()) + f", more than {MAX_OTHERS_SHARE:.0%}"
        apart = self._check.details["memcpy_spread"]
        assert isinstance(apart, float)
        return f"the middle half of the copies of 64 MiB by memcpy is {apart:.0%} wide, more than {MAX_SPREAD:.0%}" if apart > MAX_SPREAD else ""


def main() -> None:
    """Runs the benchmark, or prints the last run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model directory")
    parser.add_argument("--markdown", action="store_true", help=f"print the tables of out/{TARGET}.json as markdown and end")
    parser.add_argument("--update", type=Path, help=f"put them into a document, between its {TARGET} marks, and end")
    arguments = parser.parse_args()
    if arguments.markdown or arguments.update:
        _write_down(json.loads(Path(f"out/{TARGET}.json").read_text()), arguments.update)
        return
    if arguments.model is None:
        parser.error("--model is needed")
    check = Check(TARGET)
    check.begin("every transport against memcpy, the control path, overlap and running streams", seconds=300, quick_seconds=48)
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as directory:  # its mode is 0700
        bench = Bench(check, arguments.model, Path(directory))
        values = bench.run()
    console = Console()
    for table in tables(check.details):
        console.print(table)
    picture = plot(check.details, Path(f"out/{TARGET}.png"))
    print(f"  tables: out/{TARGET}.json, plot: {picture}", flush=True)
    reason = bench.distrust()
    if reason:
        check.void(reason)
    check.end(values)


def _write_down(report: dict[str, Any], document: Path | None) -> None:
    if document is None:
        print(markdown(report))
    elif report["verdict"] == "VOID":
        sys.exit("the last run is void: its numbers are not written down")
    else:
        document.write_text(updated(document.read_text(), markdown(report)))
        print(f"{document} has the numbers of the last run")


if __name__ == "__main__":
    main()
