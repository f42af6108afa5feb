"""What run, sweep and report do."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.environment import environment
from bench.flags import UsageError
from bench.metrics import measured, summarize
from bench.options import OutputOptions, limits_of, load_options, output_options, price_of, run_limits, search_options, server_options
from bench.planning import Planner
from bench.report import write_report
from bench.result_line import Verdict, facts, figures, result_line, sweep_line, sweep_verdict, verdict_of
from bench.run import Run
from bench.run_files import RunFileError, file_name, read_run, write_run
from bench.session import Session, open_session
from bench.sweep import Search, find_knee
from bench.sweep_files import SUFFIX, read_sweep, write_sweep
from bench.target import Target
from bench.targets import target_of


async def run(given: Namespace, command: Sequence[str]) -> Verdict:
    """One run: files, figures, the page and the line. Raises UsageError or TargetError."""
    output, load = output_options(given), load_options(given)
    target = target_of(server_options(given), load.seed)
    planner = Planner(load, output.model_dir)
    async with _session(given, command, output, target) as session:
        plan = planner.plan(session.described)
        done = await session.load(plan, output.label or f"{target.name} {plan.workload} {plan.arrivals}")
    _tell(done, write_run(done, output.directory), output)
    return verdict_of(done)


def _tell(done: Run, path: Path, output: OutputOptions) -> None:
    console = Console(highlight=False)
    summary = summarize(done, output.limits, output.price) if measured(done.records) else None
    if summary is not None:
        for line in facts(done, summary):
            console.print(line, soft_wrap=True, markup=False)
        console.print(figures(summary))
        if output.report:
            console.print(f"report: {write_report(path.with_suffix('.html'), [done], limits=output.limits, price=output.price)}", soft_wrap=True, markup=False)
    console.print(f"run: {path}", soft_wrap=True, markup=False)
    for reason in done.void:
        console.print(f"void: {reason}", soft_wrap=True, markup=False)
    print(result_line(done, summary), flush=True)


async def sweep(given: Namespace, command: Sequence[str]) -> Verdict:
    """Probes up to the knee and beyond. Raises UsageError or TargetError, and KeyboardInterrupt when it is cut."""
    output, load = output_options(given), load_options(given)
    search = _search(given, output)
    target = target_of(server_options(given), load.seed)
    label = output.label or f"{target.name} {load.workload} sweep"
    async with _session(given, command, output, target) as session:
        found = await find_knee(_Probes(session, Planner(load, output.model_dir), output, label).load, search)
    path = write_sweep(found, output.directory, label)
    console = Console(highlight=False)
    if output.report:
        page = write_report(path.with_name(f"{file_name(label)}.html"), (), found, limits=output.limits, price=output.price)
        console.print(f"report: {page}", soft_wrap=True, markup=False)
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    console.print(f"sweep: {path}", soft_wrap=True, markup=False)
    print(sweep_line(found, label), flush=True)
    return sweep_verdict(found)


def _search(given: Namespace, output: OutputOptions) -> Search:
    if len(output.limits) != 1:
        raise UsageError("a sweep looks for the rate that still meets one set of limits: give --goodput once, such as --goodput ttft:500 tpot:50")
    options = search_options(given)
    try:
        return Search(
            output.limits[0],
            start_per_s=options.start_per_s,
            min_per_s=options.min_per_s,
            max_per_s=options.max_per_s,
            width=options.width,
            min_attainment=options.min_attainment,
            max_probes=options.max_probes,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


class _Probes:
    """The runs of a sweep, each written as soon as it is there."""

    def __init__(self, session: Session, planner: Planner, output: OutputOptions, label: str) -> None:
        self._session = session
        self._planner = planner
        self._output = output
        self._label = label
        self._num_probes = 0

    async def load(self, rate_per_s: float) -> Run:
        """Other arrivals each time. Raises KeyboardInterrupt when the user cuts a probe: as a void one it would only be repeated."""
        self._num_probes += 1
        plan = self._planner.probe(self._session.described, rate_per_s, self._num_probes)
        done = await self._session.load(plan, f"{self._label} {self._num_probes:02d} at {rate_per_s:.4g} per s")
        path = write_run(done, self._output.directory)
        print(result_line(done, summarize(done, self._output.limits) if measured(done.records) else None), flush=True)
        if self._session.cut:
            print(f"cut: the runs so far are in {path.parent}", flush=True)
            raise KeyboardInterrupt
        return done


def _session(given: Namespace, command: Sequence[str], output: OutputOptions, target: Target) -> AbstractAsyncContextManager[Session]:
    def noted(described: Mapping[str, str]) -> dict[str, Any]:
        try:
            return environment(command, described=described, model_dir=output.model_dir, cores=output.cores, notes=output.notes)
        except (OSError, ValueError) as error:
            raise UsageError(f"--model-dir: {error}") from None

    console = None if output.quiet else Console(stderr=True, highlight=False)
    return open_session(target, run_limits(given, output.limits), noted, console, cold_start=not given.no_cold_start)


def report(given: Namespace) -> Verdict:
    """One page. Raises UsageError or RunFileError."""
    sweeps = [read_sweep(path) for path in given.files if path.name.endswith(SUFFIX)]
    if len(sweeps) > 1:
        raise UsageError("a page shows one sweep: give the files of single runs to compare them")
    runs = [read_run(path) for path in given.files if not path.name.endswith(SUFFIX)]
    path = given.output or given.files[0].with_name("report.html")
    try:
        write_report(path, runs, sweeps[0] if sweeps else None, limits=limits_of(given), price=price_of(given), title=given.title)
    except ValueError as error:
        raise RunFileError(str(error)) from None
    print(f"report: {path}")
    return Verdict.OK
