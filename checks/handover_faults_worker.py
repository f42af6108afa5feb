"""A worker of the check: the service's own main, in a process that can do what it is told to."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How a worker is started; the same again when it was killed."""

    role: str
    """prefill or decode."""
    arguments: tuple[str, ...]
    log: Path
    verifies: bool = True


def run_worker(spec: WorkerSpec, commands: Connection, pauses: Connection) -> None:
    """The body of the process. The service's modules are imported here and not above: what they draw at import is this process's own."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the check's end, by whatever, is its workers' end
    log = os.open(spec.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    from checks import handover_faults_nixl, handover_faults_stream
    from checks.handover_faults_line import Line
    from checks.handover_faults_pool import FaultyPool
    from checks.handover_faults_reader import FaultyReads
    from checks.handover_faults_unverified import believe_everything

    line = Line(commands, pauses, verifies=spec.verifies)
    if not spec.verifies:
        believe_everything()
    FaultyPool(line).install()
    reads = FaultyReads(line)
    reads.install()
    handover_faults_nixl.install(line, reads)
    handover_faults_stream.install(line)
    line.listen()
    raise SystemExit(_main(spec))


def _main(spec: WorkerSpec) -> int:
    if spec.role == "prefill":
        from prefill_svc.__main__ import main
    else:
        from decode_svc.__main__ import main
    return main(spec.arguments)
