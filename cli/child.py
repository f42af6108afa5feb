"""`python -m cli.child PARENT_PID MODULE ARGUMENT...`: becomes `python -m MODULE`, as a process that dies with its parent.

A program of its own and not a preexec function: the parent runs gRPC's threads, and Python code between fork and exec could deadlock there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SERVICE_MODULES = {"gateway": "gateway", "prefill": "prefill_svc", "decode": "decode_svc"}
"""Each is started as `python -m MODULE`."""

_PR_SET_PDEATHSIG = 1


def command_of(module: str, arguments: tuple[str, ...]) -> list[str]:
    """The command line of a service. -P: a folder in the working directory must not shadow the service's module."""
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent dies, also by SIGKILL. The setting outlives exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the kernel was told
        sys.exit(f"process {parent_pid}, which started this one, is gone")


if __name__ == "__main__":
    if sys.platform == "linux":
        die_with_parent(int(sys.argv[1]))
    command = command_of(sys.argv[2], tuple(sys.argv[3:]))
    os.execv(command[0], command)
