"""Hand-overs that go wrong between real workers: a few of each kind. `make check-handover-faults` has hundreds, and kills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from checks.handover_faults_kinds import IN_STREAM
from checks.handover_faults_lanes import INLINE, SHARED_MEMORY
from checks.handover_faults_parts import Counts, Part, Questions, parts_of, run_part
from checks.handover_faults_process import fork_server
from checks.tiny_models import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="session")
_FORK_SERVER = fork_server()
_NUM_FAULTS = 2
_WITHOUT_KILLS = Counts(_NUM_FAULTS, _NUM_FAULTS, kills=0, unverified=4)
_PARTS = [part for lane in (INLINE, SHARED_MEMORY) for part in parts_of(lane, _WITHOUT_KILLS)]
_VERIFYING = [part for part in _PARTS if part.verifies]
# Each kind once: what is done to the stream by inline, the rest by shared memory.
_BELIEVING = [
    replace(part, counts={kind: count for kind, count in part.counts.items() if (kind in IN_STREAM) == (part.lane is INLINE)})
    for part in _PARTS
    if not part.verifies
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def questions(tiny_model: Path) -> Questions:
    return await Questions.over(tiny_model)


@pytest.mark.parametrize("part", _VERIFYING, ids=[part.name for part in _VERIFYING])
async def test_every_fault_is_found_and_no_token_is_wrong(tiny_model: Path, questions: Questions, part: Part, tmp_path: Path) -> None:
    outcome = await run_part(_FORK_SERVER, tiny_model, part, questions, tmp_path / "log")
    assert set(outcome.tallies) == set(part.counts)
    for kind, tally in outcome.tallies.items():
        assert (tally.injected, tally.detected, sum(tally.reasons.values())) == (_NUM_FAULTS,) * 3, kind
        assert (tally.wrong, tally.failed, tally.unhealed) == (0, 0, 0), kind
    assert (outcome.num_held, outcome.num_not_serving) == (0, 0)


@pytest.mark.parametrize("part", _BELIEVING, ids=[part.lane.name for part in _BELIEVING])
async def test_the_same_faults_give_wrong_tokens_when_nothing_is_verified(tiny_model: Path, questions: Questions, part: Part, tmp_path: Path) -> None:
    outcome = await run_part(_FORK_SERVER, tiny_model, part, questions, tmp_path / "log")
    assert not [kind for kind, tally in outcome.tallies.items() if tally.wrong == 0]
