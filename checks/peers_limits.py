"""`python -m checks.peers_limits --threads N`: how fast this machine reads memory and multiplies matrices in bfloat16, as one line of JSON.

A process of its own: its threads must be gone before a server is measured.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.kernels.build import build_shared_library, default_cache_dir

_READ_MIB = (256, 1024)
"""The size of a small model's weights, which a large cache may hold in part, and one that no cache holds: the faster one is the limit."""
_SIDES = (2048, 4096)
_LAYERS = ((512, 576, 3072), (512, 1536, 576), (1024, 4096, 4096))
"""Rows, inputs and outputs of linear layers."""
_LEAST_ROUNDS, _LEAST_S = 3, 0.15


def _best_s(work: Callable[[], object]) -> float:
    """The fastest of several rounds."""
    best, ended, rounds = float("inf"), time.perf_counter() + _LEAST_S, 0
    while rounds < _LEAST_ROUNDS or time.perf_counter() < ended:
        started = time.perf_counter()
        work()
        best, rounds = min(best, time.perf_counter() - started), rounds + 1
    return best


def read_gb_per_s(threads: int) -> float:
    """Of all threads together. Raises KernelBuildError without a compiler."""
    library = ctypes.CDLL(str(build_shared_library(Path(__file__).with_name("peers_read.cpp"), default_cache_dir(), "c++")))
    read = library.peers_read
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint64
    rates = []
    for mib in _READ_MIB:
        numbers = torch.ones(mib << 17, dtype=torch.int64)
        assert read(numbers.data_ptr(), len(numbers)) == len(numbers)
        rates.append((mib << 20) / _best_s(lambda numbers=numbers: read(numbers.data_ptr(), len(numbers))) / 1e9)  # type: ignore[misc]
    return max(rates)


def matmul_gflop_per_s() -> float:
    """torch's own (oneDNN), the best of large squares and of the shapes of linear layers."""
    rates = []
    for rows, inputs, outputs in (*((side, side, side) for side in _SIDES), *_LAYERS):
        one, other = (torch.randn(of, inputs, dtype=torch.bfloat16) for of in (rows, outputs))
        into = torch.empty(rows, outputs, dtype=torch.bfloat16)
        rates.append(2 * rows * inputs * outputs / _best_s(lambda one=one, other=other, into=into: torch.mm(one, other.t(), out=into)) / 1e9)  # type: ignore[misc]
    return max(rates)


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    print(json.dumps({"read_gb_per_s": round(read_gb_per_s(threads), 1), "matmul_gflop_per_s": round(matmul_gflop_per_s(), 1)}))


if __name__ == "__main__":
    main()
