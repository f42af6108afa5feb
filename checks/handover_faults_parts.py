"""Which faults are injected into which clusters, and the prompts that all of them use."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

from checks.handover_faults_cluster import BLOCK_SIZE, running_cluster
from checks.handover_faults_kinds import IN_STREAM, IN_TRANSIT, KILLS, STALE, Kind
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

    transport: str
    counts: Mapping[Kind, int]
    checksum: bool = False
    verifies: bool = True

    @property
    def name(self) -> str:
        """For the table."""
        return f"{self.transport}{' --kv-checksum' if self.checksum else ''}{'' if self.verifies else ', nothing verified'}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part."""

    part: Part
    tallies: Mapping[Kind, Tally]
    num_held: int
    """Workers that still held something at the end."""
    num_not_serving: int
    """Workers that were not in good health at the end."""


def kinds_of(transport: str) -> tuple[Kind, ...]:
    """What can go wrong there."""
    return tuple(kind for kind in Kind if not (kind in IN_STREAM and transport != "inline") and not (kind in STALE and transport != "shared_memory"))


def parts_of(transport: str, *, count: int, num_kills: int, num_controls: int) -> tuple[Part, ...]:
    """Two clusters that verify, one without digests and one with them, and one that believes everything."""
    kinds = kinds_of(transport)
    plain = {kind: num_kills if kind in KILLS else count for kind in kinds if kind not in IN_TRANSIT}
    parts = (
        Part(transport, {kind: number for kind, number in plain.items() if number}),
        Part(transport, {kind: count for kind in kinds if kind in IN_TRANSIT}, checksum=True),
        Part(transport, {kind: num_controls for kind in kinds if kind not in KILLS}, verifies=False),
    )
    return tuple(part for part in parts if any(part.counts.values()))


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
    return tuple(place.randrange(3, VOCAB_SIZE) for _ in range(place.randint(_SHORTEST, _LONGEST)))


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
    async with running_cluster(context, model, part.transport, *options, log=log, verifies=part.verifies) as cluster:
        yield Rounds(cluster, questions.prompts, questions.answers, seed=1)
