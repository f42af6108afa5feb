"""Random requests with every parameter, through three processes and through one engine."""

from __future__ import annotations

from pathlib import Path

from checks.contract import running_fuzz
from tests.support.served_models import write_served_model

NUM_BATCHES = 14
"""Of 4 to 12 requests each."""


def test_random_requests_through_the_split_are_those_of_one_process(tmp_path: Path) -> None:
    with running_fuzz(write_served_model(tmp_path / "model"), tmp_path / "services.log") as run:
        run.fuzz(NUM_BATCHES, run_seed=7)
        assert run.num_left() == 0
        assert run.differential.seen["cases"] >= 100
        assert run.differential.seen["handover"] > 0
