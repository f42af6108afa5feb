"""`make bench-peers`: Tandem beside vLLM and transformers' continuous batching, and both beside what the machine allows.

Each server in turn has all cores, the load generator included, and gets the same requests. `--markdown` prints the last run's tables, `--update` puts them
into a document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench.openai_target import OpenAIOptions, OpenAITarget
from bench.tandem_target import TandemTarget
from bench.target import Target
from checks.clients_environment import InstallError
from checks.handover_bench_machine import MAX_OTHERS_SHARE, MAX_SPREAD, Machine, Others, cores, spread
from checks.handover_bench_report import updated
from checks.peers_cells import CELLS, EIGHT, MANY, ONE, QUICK_CELLS, Cell, measure, warm_up
from checks.peers_floor import Limits, Size, floor_of
from checks.peers_plot import plot
from checks.peers_report import TARGET, headline, markdown, sheets
from checks.peers_results import GRPC, MAX_OVER_FLOOR, MIN_OVER_TRANSFORMERS, TANDEM, TRANSFORMERS, VLLM, Results, Series
from checks.peers_rounds import Phase, phases
from checks.peers_servers import VLLM_PEER, PeerError, TandemPeer, VllmPeer, child_command, end_tree
from checks.verdict import Check, quick

_ROUNDS = 5
_SEEDS_PER_ROUND = 100
_CHILD_S = 300.0
_LOGS = Path("out")
_GRPC_CELLS = (ONE, EIGHT)


class Bench:
    """One run; `conclude` makes its tables."""

    def __init__(self, check: Check, model: Path) -> None:
        self._check = check
        self._model = model
        self._size = Size.of(model)
        self._others = Others()
        self._cells = QUICK_CELLS if quick() else CELLS
        self._limits: list[Limits] = []
        self._num_rounds = 1 if quick() else _ROUNDS
        self._peers: dict[str, TandemPeer | VllmPeer] = {
            TANDEM: TandemPeer(model, _log(TANDEM)),
            VLLM: VllmPeer(model, _log(VLLM), compiled=not quick()),
        }
        self.results = Results()
        check.details |= {"machine": asdict(Machine.here()), "model": model.name, "rounds": self._num_rounds}
        check.details |= {"others_share": self._others.shares, "part_s": self._others.elapsed_s, "peers": self._described()}

    def _described(self) -> dict[str, dict[str, str]]:
        own = {name: {"version": peer.version, "command": peer.command} for name, peer in self._peers.items()}
        if quick():
            return own
        command = f"python -m checks.peers_transformers --model MODEL --threads {len(cores())} --seed SEED"
        return {**own, TRANSFORMERS: {"version": version("transformers"), "command": command}}

    async def run(self) -> None:
        """All phases, and the machine's limits before, behind and between them."""
        await self._measure_limits()
        for phase in phases(self._num_rounds, with_transformers=not quick()):
            name = f"{phase.server}, round {' and '.join(str(each + 1) for each in phase.rounds)}"
            print(f"  {name}", flush=True)
            await (self._run_transformers(phase, name) if phase.server == TRANSFORMERS else self._run_server(phase, name))
            if phase.server != TRANSFORMERS and not quick():
                await self._measure_limits()

    async def _run_server(self, phase: Phase, name: str) -> None:
        peer = self._peers[phase.server]
        try:
            await peer.start()
            async with AsyncExitStack() as targets:
                target = await targets.enter_async_context(_opened(OpenAITarget(peer.url, OpenAIOptions())))
                doors: list[tuple[str, Target, Sequence[Cell]]] = [(phase.server, target, self._cells)]
                if isinstance(peer, TandemPeer) and not quick():
                    doors.append((GRPC, await targets.enter_async_context(_opened(TandemTarget(peer.grpc_address))), _GRPC_CELLS))
                await warm_up(target, self._size.vocab_size, phase.rounds[0], short=quick())
                self._others.begin()  # behind the start, whose compilers are gone and would count as others
                for each in phase.rounds:
                    for server, door, cells in doors:
                        await self._measure(server, door, cells, each)
                self._others.end(name)
        finally:
            await peer.stop()

    async def _measure(self, server: str, target: Target, cells: Sequence[Cell], each: int) -> None:
        for place, cell in enumerate(cells):
            # The same prompts for all servers of a round; no two rounds share one, nor do two doors of one server.
            seed = _SEEDS_PER_ROUND * each + place + (len(CELLS) if server == GRPC else 0)
            reading = await measure(cell, target, self._size.vocab_size, seed)
            self.results.add(cell, server, reading)
            print(f"    {cell.name}: {cell.figure} {getattr(reading, cell.figure):,.1f} in {reading.seconds:.1f} s", flush=True)

    async def _run_transformers(self, phase: Phase, name: str) -> None:
        self._others.begin()
        for each in phase.rounds:
            seed = _SEEDS_PER_ROUND * each + CELLS.index(EIGHT)
            arguments = ["-m", "checks.peers_transformers", f"--model={self._model}", f"--threads={len(cores())}", f"--seed={seed}"]
            found = await _run_child(TRANSFORMERS, arguments)
            self.results.transformers.append(found["output_tokens"] / found["seconds"])
            print(f"    {EIGHT.name}: output_tokens_per_s {self.results.transformers[-1]:,.1f} in {found['seconds']:.1f} s", flush=True)
        self._others.end(name)

    async def _measure_limits(self) -> None:
        self._limits.append(Limits(**await _run_child("limits", ["-m", "checks.peers_limits", f"--threads={len(cores())}"])))

    def conclude(self) -> dict[str, int | float | str]:
        """Tables and goals; what the last line says."""
        limits = Limits(*(statistics.median(getattr(each, name) for each in self._limits) for name in ("read_gb_per_s", "matmul_gflop_per_s")))
        rows = [self.results.row(cell, floor_of(cell, self._size, limits)) for cell in self._cells]
        per_limit = {name: Series([getattr(each, name) for each in self._limits]).row() for name in asdict(limits)}
        self._check.details |= {"limits": per_limit, "cells": rows}
        values: dict[str, int | float | str] = {}
        for cell in self._cells:
            ratio = self.results.ratios(cell).median
            values[f"{cell.name.replace(',', '').replace(' ', '_')}_ratio"] = round(ratio, 2)
            # In a quick run vLLM does without the compiled model, whose start alone takes longer: its ratios flatter.
            self._check.goal(quick() or cell.is_met(ratio), f"{cell.name}: {cell.figure} is {ratio:.2f} of vLLM's, {cell.goal} is asked for")
        if quick():
            return values
        beside = self.results.over_transformers()
        rate = Series(self.results.transformers).row()
        over = self.results.took_s(MANY, TANDEM).median / floor_of(MANY, self._size, limits).figure_s
        self._check.details |= {"transformers": {"cell": EIGHT.name, "output_tokens_per_s": rate, "ratio": beside.row()}, "over_floor": round(over, 3)}
        asked = f"at least {MIN_OVER_TRANSFORMERS:g} is asked for"
        self._check.goal(beside.median >= MIN_OVER_TRANSFORMERS, f"{EIGHT.name}: {beside.median:.2f} of transformers' rate, {asked}")
        self._check.goal(over <= MAX_OVER_FLOOR, f"{MANY.name}: {over:.2f} times the machine's floor, at most {MAX_OVER_FLOOR:g} is asked for")
        return {**values, "over_transformers": round(beside.median, 2), "over_floor": round(over, 2)}

    def distrust(self) -> str:
        """Why the numbers cannot be trusted; empty when they can."""
        busy = {name: share for name, share in self._others.shares.items() if share > MAX_OTHERS_SHARE}
        if busy:
            return "others took " + ", ".join(f"{share:.0%} of the cores in {name!r}" for name, share in busy.items()) + f", more than {MAX_OTHERS_SHARE:.0%}"
        apart = spread([each.read_gb_per_s for each in self._limits])
        return f"the middle half of the rates of reading is {apart:.0%} wide, more than {MAX_SPREAD:.0%}" if apart > MAX_SPREAD else ""


def _log(server: str) -> Path:
    return _LOGS / f"{TARGET}-{server}.log"


@asynccontextmanager
async def _opened(target: Target) -> AsyncIterator[Target]:
    try:
        await target.open()
        yield target
    finally:
        await target.close()


async def _run_child(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """One line of JSON by a program of ours that has all cores. Raises PeerError."""
    with _log(name).open("a") as log:
        process = await asyncio.create_subprocess_exec(
            *child_command([sys.executable, *arguments]),
            env={**os.environ, "OMP_NUM_THREADS": str(len(cores())), "HF_HUB_OFFLINE": "1"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _CHILD_S)
        except TimeoutError:
            raise PeerError(f"{name} had not ended after {_CHILD_S:g} s") from None
        finally:
            await end_tree(process)
    if process.returncode:
        raise PeerError(f"{name} ended with {process.returncode}: see {_log(name)}")
    found: dict[str, Any] = json.loads(output)
    return found


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
    if not VLLM_PEER.is_there:
        print(f"{TARGET}: {VLLM_PEER.packages[0]}, about {VLLM_PEER.megabytes / 1000:.1f} GB into {VLLM_PEER.folder}, 2 to 10 minutes", flush=True)
    try:
        VLLM_PEER.install()
    except InstallError as error:
        check.void(str(error))
    check.begin("Tandem beside vLLM and transformers, by turns", seconds=900, quick_seconds=48)
    if quick():
        print("  vLLM runs uncompiled, which takes its start from a minute to half of one: no goal is held against it here", flush=True)
    _LOGS.mkdir(exist_ok=True)
    for log in _LOGS.glob(f"{TARGET}-*.log"):
        log.unlink()
    bench = Bench(check, arguments.model)
    try:
        uvloop.run(bench.run())
    except PeerError as error:
        check.void(str(error))
    values = bench.conclude()
    console = Console()
    for sheet in sheets(check.details):
        console.print(sheet.table())
    picture = plot(check.details, Path(f"out/{TARGET}.png"))
    print(f"  {headline(check.details)}\n  tables: out/{TARGET}.json, plot: {picture}", flush=True)
    if reason := bench.distrust():
        check.void(reason)
    check.end(values)


def _write_down(report: dict[str, Any], document: Path | None) -> None:
    if document is None:
        print(markdown(report))
    elif report["verdict"] == "VOID":
        sys.exit("the last run is void: its numbers are not written down")
    else:
        document.write_text(updated(document.read_text(), markdown(report), TARGET))
        print(f"{document} has the numbers of the last run")


if __name__ == "__main__":
    main()
