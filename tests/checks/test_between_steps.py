"""`make bench-between-steps`: measures steps of the real engine, with a forward that takes no time."""

from __future__ import annotations

import asyncio
import cProfile
from pathlib import Path

import pytest

from checks.between_steps import SAMPLING, Found, measure, profiled, show
from checks.documents import rows_as_markdown
from checks.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "llama", vocab_size=49_152)


@pytest.mark.parametrize("sampling", SAMPLING)
def test_each_part_of_a_step_is_told_and_is_less_than_the_step(model: Path, sampling: str) -> None:
    found = asyncio.run(measure(model, sampling, 4, 60))
    assert set(found.parts) == {"schedule", "build", "sample", "take", "deliver"}
    assert all(0.0 < part < found.median for part in found.parts.values())
    assert found.median <= found.p99


def test_the_profile_is_of_the_engines_thread(model: Path) -> None:
    profile = cProfile.Profile()
    asyncio.run(measure(model, "greedy", 4, 60, profile))
    functions = " ".join(str(row["function"]) for row in profiled(profile, 60))
    assert "scheduler.py" in functions and "engine.py" in functions and "sampler.py" not in functions


def test_tables_have_a_row_for_each_kind_of_sampling() -> None:
    found = [Found(name, 64, 1.0, 2.0, {"schedule": 0.1, "sample": 0.5}) for name in SAMPLING]
    assert show(found).row_count == len(SAMPLING)
    text = rows_as_markdown([each.row() for each in found], code="sampling")
    assert text.splitlines()[0] == "| sampling | batch | median ms | p99 ms | schedule | sample |"
    assert "| `greedy` | 64 | 1.0 | 2.0 | 0.1 | 0.5 |" in text
