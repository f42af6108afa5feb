"""make gpu-check: the cuda_ipc transport on a GPU, with two processes that share it. Installs nothing; needs numpy, CuPy and torch, no gRPC."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from checks.verdict import Check, quick

_TARGET = "gpu-check"


def missing() -> str:
    """Why this machine cannot run the check; empty when it can."""
    for name in ("cupy", "torch", "numpy"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    try:
        count = int(importlib.import_module("cupy").cuda.runtime.getDeviceCount())
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return "" if count else "CUDA sees none"


def skip(reason: str) -> None:
    """Says so in one line, which is neither a success nor a failure."""
    print(f"SKIP {_TARGET} no GPU: {reason}", flush=True)


def main() -> None:
    """The program of the target."""
    reason = missing()
    if reason:
        skip(reason)
        sys.exit(0)
    # Only now: they need what is looked for above.
    from checks.cuda_check import FULL, QUICK, GpuCheck
    from checks.cuda_peer import Peer, PeerFailedError
    from kvtransfer.cuda_runtime import CudaError

    check = Check(_TARGET)
    check.begin("cuda_ipc with two processes on one GPU", seconds=240, quick_seconds=50)
    run = GpuCheck(check, QUICK if quick() else FULL, lambda name: Peer(name, "checks.cuda_work:on_gpu"))
    try:
        run.run()
    except (CudaError, PeerFailedError) as error:
        check.void(str(error))
    check.end(run.values)


if __name__ == "__main__":
    main()
