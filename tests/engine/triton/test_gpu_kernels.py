"""What gpu-check does with the kernels, at tiny sizes in the interpreter: nothing but a device is missing."""

from __future__ import annotations

import torch

from checks.gpu_kernels import SMALL, Kernels, broken


def test_every_kernel_is_checked_and_timed() -> None:
    rows = list(Kernels(torch.device("cpu"), SMALL).rows())
    assert [row["kernel"] for row in rows] == [
        "add_rms_norm",
        "rotate",
        "gated",
        "write_kv",
        "gather_blocks",
        "paged_prefill",
        "paged_decode",
        "matmul of 1",
        "matmul of 3",
    ]
    assert broken(rows) == []
    assert all(float(row["us"]) > 0.0 for row in rows)


def test_a_kernel_that_is_far_off_is_named() -> None:
    assert broken([{"kernel": "rotate", "error": 0.5}, {"kernel": "gated", "error": 0.001}, {"kernel": "matmul", "error": float("nan")}]) == [
        "rotate (0.5)",
        "matmul (nan)",
    ]
