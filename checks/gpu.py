"""make gpu-check: on a GPU, the cuda_ipc transport with two processes that share it, and Triton's kernels against float64 and against the card's limits.

Installs nothing; needs numpy, CuPy, torch, transformers and Triton, no gRPC.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from checks.verdict import Check, quick

_TARGET = "gpu-check"


def missing() -> str:
    """Why this machine cannot run the check; empty when it can."""
    for name in ("cupy", "torch", "numpy", "triton", "transformers"):
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


def kernels(check: Check, values: dict[str, int | float | str]) -> None:
    """Every kernel's error and speed, told line by line: this machine need not have what draws tables."""
    import torch

    from checks.gpu_kernels import LLAMA_8B, SMALL, Kernels, broken

    rows = []
    for row in Kernels(torch.device("cuda"), SMALL if quick() else LLAMA_8B).rows():
        rows.append(row)
        print("  " + ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    check.details["kernels"] = rows
    values["kernels"] = f"{len(rows) - len(broken(rows))}/{len(rows)}"
    check.goal(not broken(rows), f"kernels that are far from float64: {', '.join(broken(rows))}")


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
    check.begin("cuda_ipc with two processes on one GPU, and Triton's kernels", seconds=300, quick_seconds=50)
    run = GpuCheck(check, QUICK if quick() else FULL, lambda name: Peer(name, "checks.cuda_work:on_gpu"))
    try:
        run.run()
    except (CudaError, PeerFailedError) as error:
        check.void(str(error))
    kernels(check, run.values)
    check.end(run.values)


if __name__ == "__main__":
    main()
