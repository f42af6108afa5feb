"""Which faults are injected into which clusters, and the prompts that all of them use."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from zlib import crc32

from checks.handover_faults_cluster import BLOCK_SIZE, running_cluster
from checks.handover_faults_kinds import IN_STREAM, KILLS, STALE, Kind
from checks.handover_faults_lanes import Lane
from checks.handover_faults_process import SERVING
from checks.handover_faults_rounds import Rounds, Tally
from checks.one_engine import Prompt, Setup, run_engine
from checks.tiny_models import VOCAB_SIZE

_NUM_PROMPTS = 48
_SHORTEST, _LONGEST, _NUM_OUTPUT = 84, 120, 10
# In chunks of 64 tokens, each is handed over in two runs of more than one block.


@dataclass(frozen=True, slots=True)
class Part:
    """One cluster and what it goes through."""

    lane: Lane
    counts: Mapping[Kind, int]
    checksum: bool = False
    verifies: bool = True

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.lane.name}{' --kv-checksum' if self.checksum else ''}{'' if self.verifies else ', nothing verified'}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part."""

    part: Part
    tallies: Mapping[Kind, Tally]
    num_held: int
    """Workers that still held something at the end."""
    num_not_serving: int
    """Workers that were not in good health at the end."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many faults of a kind are injected on one lane."""

    everywhere: int
    on_few: int
    """Of kinds that not every lane has."""
    kills: int
    """Of either side."""
    unverified: int
    """In the control."""

    def of(self, kind: Kind) -> int:
        """In a cluster that verifies."""
        return self.kills if kind in KILLS else self.on_few if kind in IN_STREAM | STALE else self.everywhere

    def unverified_of(self, kind: Kind) -> int:
        """In one that believes everything. Of a decode worker that is killed nothing is left that could."""
        if kind in KILLS:
            return 0 if kind is Kind.KILLED_DECODE else min(self.kills, self.unverified // 2)
        return self.unverified * (2 if kind is Kind.FLIPPED_BYTE else 1)  # most bytes of a number hardly matter


def parts_of(lane: Lane, counts: Counts) -> tuple[Part, ...]:
    """Two clusters that verify, one without digests and one with them, and one that believes everything; none that has nothing to do."""
    with_digests = {kind: counts.of(kind) for kind in lane.kinds_for_digests}
    without = {kind: counts.of(kind) for kind in lane.kinds if kind not in with_digests}
    unverified = {kind: counts.unverified_of(kind) for kind in lane.kinds}
    parts = (Part(lane, _some(without)), Part(lane, _some(with_digests), checksum=True), Part(lane, _some(unverified), verifies=False))
    return tuple(part for part in parts if part.counts)


def _some(counts: Mapping[Kind, int]) -> dict[Kind, int]:
    return {kind: count for kind, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts, and what one process answers."""

    prompts: Sequence[Prompt]
    answers: Sequence[Sequence[int]]

    @classmethod
    async def over(cls, model: Path) -> Questions:
        """Computed by one engine, no two prompts in one step."""
        place = random.Random(7)
        prompts = [Prompt(_prompt(place), _NUM_OUTPUT) for _ in range(_NUM_PROMPTS)]
        run = await run_engine(model, prompts, Setup("reference", {"num_threads": 1, "block_size": BLOCK_SIZE}, at_once=False))
        return cls(prompts, run.outputs)


def _prompt(place: random.Random) -> tuple[int, ...]:
    length = place.randint(_SHORTEST, _LONGEST)
    # Its last block is never full: decode's prefix cache never has all of it, and there is always something to hand over.
    return tuple(place.randrange(3, VOCAB_SIZE) for _ in range(length + (length % BLOCK_SIZE == 0)))


async def run_part(context: ForkServerContext, model: Path, part: Part, questions: Questions, log: Path) -> Outcome:
    """Starts the cluster, injects everything, and looks at what is left. Raises NotInjectedError."""
    async with _running_rounds(context, model, part, questions, log) as rounds:
        for kind, count in part.counts.items():
            await rounds.run(kind, count)
        await rounds.nothing_held()
        workers = rounds.cluster.workers
        held = [await worker.num_held() for worker in workers]
        health = [await worker.health() for worker in workers]
        return Outcome(part, rounds.tallies, sum(map(bool, held)), sum(status != SERVING for status in health))


@asynccontextmanager
async def _running_rounds(context: ForkServerContext, model: Path, part: Part, questions: Questions, log: Path) -> AsyncIterator[Rounds]:
    options = ("--kv-checksum",) if part.checksum else ()
    async with running_cluster(context, model, part.lane, *options, log=log, verifies=part.verifies) as cluster:
        yield Rounds(cluster, questions.prompts, questions.answers, seed=crc32(part.name.encode()), verifies=part.verifies)
