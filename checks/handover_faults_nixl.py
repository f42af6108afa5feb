"""Faults within NIXL's two directions: between two looks at the generations, and in a slot of decode's staging region."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from checks.handover_faults_kinds import IN_TRANSIT, Kind, Pause
from checks.handover_faults_line import Line, put_around
from checks.handover_faults_reader import FaultyReads, damaged
from kvtransfer.memories import Blocks
from kvtransfer.nixl_pull import NixlPull
from kvtransfer.nixl_push import NixlPush


def install(line: Line, reads: FaultyReads) -> None:
    """Around NixlPull's look and NixlPush's emptying of a slot, of every instance."""

    def with_pause(look: Any) -> Any:
        async def faulty(pull: NixlPull, ids: Sequence[int], generations: Sequence[int], when: str) -> None:
            await look(pull, ids, generations, when)
            order = line.take({Kind.STALE_DURING_COPY}, reads.first_block) if len(ids) > 1 and when.startswith("before") else None
            if order is not None:
                line.injected(order)
                await line.pause(Pause(reads.first_block, len(ids)))

        return faulty

    def with_damage(empty: Any) -> Any:
        async def faulty(push: NixlPush, write: Any, rows: Sequence[int], blocks: Blocks) -> None:
            await asyncio.shield(write.task)
            order = line.take(IN_TRANSIT, reads.first_block) if len(rows) > 1 else None
            if order is not None:
                filled = write.slot.bytes[: len(rows) * blocks.shape[1]].reshape(len(rows), -1)
                filled[:] = damaged(order.kind, random.Random(order.seed), blocks[list(rows)], filled.copy())
                line.injected(order)
            await empty(push, write, rows, blocks)

        return faulty

    put_around(NixlPull, "_look", with_pause)
    put_around(NixlPush, "_empty", with_damage)
