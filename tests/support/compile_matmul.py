"""Compiles the product's kernel for a card that is not here, and says what became of it: `python -m tests.support.compile_matmul 90`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from engine.kernels.triton.matmul import matmul
from tests.support.compile_only import compile_only


def main() -> None:
    """One line of JSON for each kernel, without its code."""
    found = compile_only(int(sys.argv[1]))
    for dtype in (torch.bfloat16, torch.float32):
        for num_outputs in (576, 8192, 16384):
            for num_rows in (1, 64):
                matmul(torch.empty(num_rows, 576, dtype=dtype), torch.empty(num_outputs, 576, dtype=dtype), None, torch.empty(num_rows, num_outputs))
    for kernel in found:
        print(json.dumps({**asdict(kernel), "ptx": "", "uses_tensor_cores": kernel.uses_tensor_cores}))


if __name__ == "__main__":
    main()
