"""`make bench-engine`: runs on a tiny model, and tells of all that it measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from checks.engine_bench_device import PREFILL_CHUNK, Bench, measure_startup
from checks.engine_bench_plot import plot
from checks.engine_bench_report import markdown, tables
from checks.tiny_models import write_tiny_model
from engine.step import StepPlan, StepResult

_MODEL_LEN = 2048


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=_MODEL_LEN)


def test_a_quick_run_ends_in_a_verdict_and_leaves_its_figures_and_its_picture(model: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "QUICK": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "checks.engine_bench", "--model", str(model)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False)
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"(OK|SHORT) bench-engine step_1_ms=[\d.]+ of_read_limit=[\d.]+ of_matmul_limit=[\d.]+.*", last), done.stdout + done.stderr
    assert (tmp_path / "out" / "bench-engine.json").is_file() and (tmp_path / "out" / "bench-engine.png").stat().st_size > 10_000


def test_a_step_has_a_token_of_each_sequence_and_a_prompt_all_of_its_chunks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Bench.opened(model, 1, 0.05) as bench:
        seen: list[list[tuple[int, int]]] = []
        launch = bench._device.launch

        def noted(plan: StepPlan) -> Future[StepResult]:
            seen.append([(each.first_position, len(each.token_ids)) for each in plan.chunks])
            return launch(plan)

        monkeypatch.setattr(bench._device, "launch", noted)
        assert bench.step_s(3, 100) > 0.0 and bench.prompt_s(PREFILL_CHUNK + 1) > 0.0
        assert seen == [[(100, 1)] * 3, [(0, PREFILL_CHUNK)], [(PREFILL_CHUNK, 1)]]


def test_transformers_module_can_be_measured_beside(model: Path) -> None:
    with Bench.opened(model, 1, 0.05, native=False) as bench:
        assert bench.step_s(1, 20) > 0.0 and not bench.batch_invariant


def test_startup_is_told_in_parts(model: Path) -> None:
    startup = measure_startup(model, 1, cold=False)
    assert startup.load_s > 0.0 and startup.pack_s > 0.0 and startup.compile_s is None


def test_tables_and_picture_hold_every_cell(tmp_path: Path) -> None:
    steps = [{"batch": batch, "context": context, "ms": 1.5 * batch, "gb_per_s": 9.0, "of_limit": 0.5} for batch, context in [(1, 128), (8, 128), (1, 1024)]]
    details = {
        "machine": {"num_cores": 2, "isa": "amx", "read_gb_per_s": 28.0, "matmul_gflop_per_s": 2100.0},
        "model": {"name": "m", "packed_mb": 269.0, "kv_bytes_a_token": 23_040, "prefill_chunk": 512},
        "startup": {"load_s": 1.0, "pack_s": 0.5, "compile_s": 12.0},
        "steps": steps,
        "prompts": [{"tokens": 512, "ms": 90.0, "gflop_per_s": 1500, "of_limit": 0.71}],
        "compared": [{"forward": "native, avx2", "batch_invariant": "True", "step_1_ms": 20.0, "step_8_ms": 30.0, "prompt_256_ms": 900.0}],
    }
    text = markdown(details)
    assert "| 8 | 12.0 (0.50) | - |" in text and "| 512 | 90 | 1,500 | 0.71 |" in text and "native, avx2" in text and "| 1,024 | 23.6 |" in text
    assert len(tables(details)) == 4
    assert plot(details, tmp_path / "picture.png").stat().st_size > 10_000
