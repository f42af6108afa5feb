"""Kernels compiled for cards that are not here, each in a process in which they are not interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""That a program may have."""


def _compiled(module: str, capability: int, cache: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", f"tests.support.{module}", str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("capability", _SHARED_BYTES)
def test_products_run_on_tensor_cores_in_the_shared_memory_that_there_is_and_compile_once_for_all_numbers_of_rows(tmp_path: Path, capability: int) -> None:
    kernels = _compiled("compile_matmul", capability, tmp_path)
    assert [kernel["uses_tensor_cores"] for kernel in kernels] == [True] * 6 + [False] * 6, "float32 is not rounded to what they take"
    assert max(kernel["shared_bytes"] for kernel in kernels) <= 99 << 10 <= _SHARED_BYTES[capability]
    ones, many = kernels[::2], kernels[1::2]
    assert [kernel["hash"] for kernel in ones] == [kernel["hash"] for kernel in many]


@pytest.mark.parametrize("capability", [90])
def test_a_step_compiles_with_attention_on_tensor_cores_and_once_for_all_numbers_of_tokens(tmp_path: Path, capability: int) -> None:
    kernels = _compiled("compile_step", capability, tmp_path)
    attention = {"_paged_prefill_kernel", "_split_kernel"}
    assert {kernel["name"] for kernel in kernels if kernel["uses_tensor_cores"]} == attention
    assert len({kernel["name"] for kernel in kernels}) == 9
    assert max(kernel["shared_bytes"] for kernel in kernels) <= 99 << 10 <= _SHARED_BYTES[capability]
    rows = [kernel["hash"] for kernel in kernels if kernel["name"] == "_add_rms_norm_kernel"]
    assert len(set(rows)) == 2, "with and without a residual"
    prefill = [kernel["hash"] for kernel in kernels if kernel["name"] == "_paged_prefill_kernel"]
    assert len(prefill) == 6 and len(set(prefill)) == 3, "by head_dim and window"
