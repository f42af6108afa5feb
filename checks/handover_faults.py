"""`make check-handover-faults`: whatever goes wrong with a hand-over is found, and no client ever sees a token that one process would not give."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from checks.handover_faults_kinds import IN_TRANSIT, Kind
from checks.handover_faults_lanes import INLINE, SHARED_MEMORY, lanes
from checks.handover_faults_parts import Counts, Outcome, Part, Questions, parts_of, run_part
from checks.handover_faults_process import WorkerEndedError, fork_server
from checks.handover_faults_rounds import NotInjectedError, Tally
from checks.tiny_models import write_tiny_model
from checks.verdict import Check, quick

TARGET = "check-handover-faults"
_NUM_AT_ONCE = 2
"""Clusters: each has three processes that mostly wait for each other."""
_LOG = Path(f"out/{TARGET}.log")


_FULL = Counts(everywhere=40, on_few=100, kills=25, unverified=16)
"""On four lanes at least 100 of each kind; the nixl lanes are two of them."""
_FULL_WITHOUT_NIXL = Counts(everywhere=50, on_few=100, kills=50, unverified=16)
_QUICK = Counts(everywhere=2, on_few=2, kills=1, unverified=4)


def _parts() -> list[Part]:
    found = lanes()
    counts = _QUICK if quick() else _FULL if len(found) > 2 else _FULL_WITHOUT_NIXL
    parts = (part for lane in found for part in parts_of(lane, counts))
    return [part for part in parts if part.verifies or not quick() or part.lane in (INLINE, SHARED_MEMORY)]


async def _run(model: Path, parts: Sequence[Part]) -> list[Outcome]:
    context, questions = fork_server(), await Questions.over(model)
    turns = asyncio.Semaphore(_NUM_AT_ONCE)

    async def run(part: Part) -> Outcome:
        async with turns:
            started_s = time.monotonic()
            outcome = await run_part(context, model, part, questions, _LOG)
        print(f"  {part.name}: {sum(part.counts.values())} faults in {time.monotonic() - started_s:.1f} s", flush=True)
        return outcome

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(run(part)) for part in parts]
    return [each.result() for each in running]


def _rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[Kind, Part, Tally]]:
    for kind in Kind:
        for outcome in outcomes:
            if kind in outcome.tallies:
                yield kind, outcome.part, outcome.tallies[kind]


def _print_table(outcomes: Sequence[Outcome]) -> None:
    print(f"  {'fault':<18}{'where':<38}{'injected':>9}{'detected':>9}{'wrong':>6}{'failed':>7}  reasons, who computed the prompt then")
    for kind, part, tally in _rows(outcomes):
        then = ", ".join(f"{name} {count:g}" for name, count in [*sorted(tally.reasons.items()), *sorted(tally.by.items())])
        print(f"  {kind:<18}{part.name:<38}{tally.injected:>9}{tally.detected:>9}{tally.wrong:>6}{tally.failed:>7}  {then}")


def _judge(check: Check, outcomes: Sequence[Outcome]) -> Counter[str]:
    """Sets the goals; what the last line says."""
    sums = Counter(injected=0, detected=0, wrong=0, failed=0, held=0, not_serving=0, control_injected=0, control_wrong=0)
    harm, kinds = Counter[Kind](), Counter[Kind]()
    for kind, part, tally in _rows(outcomes):
        where = f"{kind} over {part.name}"
        if not part.verifies:
            harm[kind] += tally.wrong
            sums += Counter(control_injected=tally.injected, control_wrong=tally.wrong)
            continue
        kinds[kind] += tally.injected
        sums += Counter(injected=tally.injected, detected=tally.detected, wrong=tally.wrong, failed=tally.failed)
        check.goal(tally.detected == tally.injected, f"{where}: {tally.detected} of {tally.injected} were detected")
        counted = sum(tally.reasons.values())
        check.goal(kind is Kind.KILLED_DECODE or counted == tally.injected, f"{where}: decode's metrics count {counted:g} failed attempts of {tally.injected}")
        check.goal(tally.wrong == 0, f"{where}: {tally.wrong} streams had wrong tokens")
        check.goal(tally.failed == 0, f"{where}: {tally.failed} streams failed")
        check.goal(tally.unhealed == 0, f"{where}: {tally.unhealed} times the next hand-over took another way")
    for outcome in outcomes:
        sums += Counter(held=outcome.num_held, not_serving=outcome.num_not_serving)
        check.goal(outcome.num_held == 0, f"{outcome.part.name}: {outcome.num_held} workers still hold something")
        check.goal(outcome.num_not_serving == 0, f"{outcome.part.name}: {outcome.num_not_serving} workers do not serve")
    for kind in Kind:
        check.goal(quick() or kinds[kind] >= 100, f"{kind}: {kinds[kind]} were injected, fewer than 100")
        check.goal(kind is Kind.KILLED_DECODE or harm[kind] > 0, f"{kind}: with verification off it did no harm, so that it proves nothing")
    sums["kinds"] = sum(1 for kind in kinds if kinds[kind])
    return sums


def main() -> None:
    """Runs the check."""
    check = Check(TARGET)
    check.begin("hand-overs that are cut, swapped, damaged, outdated and killed", seconds=360, quick_seconds=50)
    print(f"  digests are on (--kv-checksum) only for {', '.join(sorted(IN_TRANSIT))}: the others are found without", flush=True)
    _LOG.parent.mkdir(exist_ok=True)
    _LOG.unlink(missing_ok=True)
    with TemporaryDirectory() as directory:
        try:
            outcomes = asyncio.run(_run(write_tiny_model(Path(directory) / "model"), _parts()))
        except ExceptionGroup as errors:
            _end_early(check, errors)
    _print_table(outcomes)
    sums = _judge(check, outcomes)
    check.details["faults"] = [
        {"kind": kind, "transport": part.lane.name, "checksum": part.checksum, "verified": part.verifies, **_details(tally)}
        for kind, part, tally in _rows(outcomes)
    ]
    names = ("kinds", "injected", "detected", "wrong", "failed", "held", "not_serving", "control_injected", "control_wrong")
    check.end({name: sums[name] for name in names})


def _end_early(check: Check, errors: ExceptionGroup[Exception]) -> NoReturn:
    """Raises what is the check's own mistake."""
    ended, rest = errors.split(WorkerEndedError)
    if ended is not None:
        check.goal(False, f"a service is not alive: {'; '.join(map(str, ended.exceptions))}; see {_LOG}")
        check.end({})
    not_injected, rest = errors.split(NotInjectedError)
    if not_injected is None or rest is not None:
        raise errors
    check.void("; ".join(map(str, not_injected.exceptions)))


def _details(tally: Tally) -> dict[str, object]:
    return {
        **{name: getattr(tally, name) for name in ("injected", "detected", "wrong", "failed", "unhealed")},
        "reasons": dict(tally.reasons),
        "computed_by": dict(tally.by),
    }


if __name__ == "__main__":
    main()
