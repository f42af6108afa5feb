"""MKL's strict mode: asked for in time, kept, and not claimed where it is not in force."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.build import build_torch_engine_parts
from engine.config import ConfigError, EngineConfig
from engine.strict_sums import sums_are_strict


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(576, 1536), (96, 1000), (960, 576), (1024, 1024), (576, 4096)])
def test_a_rows_product_has_the_same_bits_for_every_number_of_threads_and_every_multiple_of_16_rows(num_outputs: int, num_inputs: int) -> None:
    assert sums_are_strict()
    weight, row = torch.randn(num_outputs, num_inputs), torch.randn(num_inputs)
    found: set[bytes] = set()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for num_rows in (16, 32, 48, 64, 112, 256, 512):
                for place in (0, 5, num_rows - 1):
                    rows = torch.randn(num_rows, num_inputs)
                    rows[place] = row
                    found.add(torch.nn.functional.linear(rows, weight)[place].numpy().tobytes())
    finally:
        torch.set_num_threads(1)
    assert len(found) == 1


def test_loading_a_model_asks_for_it_in_time(tiny_llama: Path) -> None:
    code = """
from pathlib import Path
from engine.model import load_model
from engine.strict_sums import sums_are_strict
"""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    for loading, strict in ((f"load_model(Path({str(tiny_llama)!r}))", True), ("", False)):
        program = f"{code}{loading}\nassert sums_are_strict() is {strict}"
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


def test_several_threads_without_it_promise_nothing(tiny_llama: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.forward.sums_are_strict", lambda: False)
    for num_threads, promised in ((1, True), (2, False)):
        config = EngineConfig(tiny_llama, num_blocks=24, forward="module", num_threads=num_threads, cache_dir=kernel_cache)
        _, kv_cache, device = build_torch_engine_parts(config)
        device.close()
        kv_cache.close()
        assert device.batch_invariant is promised
    with pytest.raises(ConfigError, match=r"^batch_invariant: .*MKL is not in its strict mode"):
        build_torch_engine_parts(EngineConfig(tiny_llama, num_blocks=24, forward="module", num_threads=2, cache_dir=kernel_cache, batch_invariant=True))
