"""Faults in prefill's pool: blocks that get other content while decode is on its way to them, or copies them."""

from __future__ import annotations

import asyncio
import random
import secrets
from typing import Any

import numpy as np

from checks.handover_faults_line import Line, put_around
from engine.async_engine import AsyncEngine, SequenceStream
from engine.events import Failed, Finished
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceKind, SequenceSpec, SequenceState
from kvtransfer.hold import Hold, Holds

_HELD_S = 10.0
_POLL_S = 0.001
_MAX_TOKEN_ID = 300


class FaultyPool:
    """Knows the worker's engine and holds as soon as they are there. One prompt at a time is handed over."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._engine: AsyncEngine | None = None
        self._holds: Holds | None = None
        self._seq_id = ""

    def install(self) -> None:
        """Listens to AsyncEngine and Holds, and offers the deeds."""
        put_around(AsyncEngine, "start", self._with_start)
        put_around(AsyncEngine, "submit", self._with_submit)
        put_around(Holds, "__init__", self._with_holds)
        self._line.offer("make_stale", self.make_stale)
        self._line.offer("reuse", self.reuse)

    def _with_start(self, start: Any) -> Any:
        async def started(engine: AsyncEngine) -> None:
            self._engine = engine
            self._line.runs_on(asyncio.get_running_loop())
            await start(engine)

        return started

    def _with_submit(self, submit: Any) -> Any:
        def submitted(engine: AsyncEngine, spec: SequenceSpec) -> SequenceStream:
            if spec.reader_id:
                self._seq_id = spec.seq_id
            stream: SequenceStream = submit(engine, spec)
            return stream

        return submitted

    def _with_holds(self, make: Any) -> Any:
        def made(holds: Holds, *arguments: Any) -> None:
            self._holds = holds
            make(holds, *arguments)

        return made

    async def make_stale(self, first_block: int, num_blocks: int, seed: int) -> int:
        """One of these blocks of the open hold has another content and is held for it. Returns how many have."""
        hold = await self._computed()
        pool_ids = hold.pool_ids[first_block : first_block + num_blocks]
        cache = self._the_engine().kv_cache
        block = random.Random(seed).choice(pool_ids)
        # Given back, and taken again: odd as it was.
        cache.generations[block] = (cache.generations[block] + 2) & 0xFFFFFFFF
        cache.blocks[block] = np.roll(cache.blocks[block], cache.blocks.shape[1] // 2 + 4)
        return 1

    async def reuse(self, first_block: int, num_blocks: int, seed: int) -> int:
        """Gives the hold's blocks back behind its RPC and computes another prompt into the whole pool. Returns how many of these blocks have other bytes."""
        engine, hold = self._the_engine(), await self._computed()
        pool_ids = hold.pool_ids[first_block : first_block + num_blocks]
        before = engine.kv_cache.blocks[list(pool_ids)]
        engine.release(self._seq_id)
        engine.drop(hold.reader_id)
        num_tokens = engine.kv_cache.num_blocks * engine.model.layout.block_size - 1
        await _compute(engine, [random.Random(seed).randrange(3, _MAX_TOKEN_ID) for _ in range(num_tokens)])
        after = engine.kv_cache.blocks[list(pool_ids)]
        return int((before != after).any(axis=1).sum())

    async def _computed(self) -> Hold:
        """The open hold, once its prompt is computed: what is done to its blocks then is the hand-over's affair alone."""
        assert self._holds is not None
        (hold,) = self._holds
        async with asyncio.timeout(_HELD_S):
            while hold.num_announced_blocks < hold.num_blocks or not await self._num_held():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        return hold

    async def _num_held(self) -> int:
        return (await self._the_engine().report()).sequences_by_state.get(SequenceState.HELD.value, 0)

    def _the_engine(self) -> AsyncEngine:
        assert self._engine is not None
        return self._engine


async def _compute(engine: AsyncEngine, prompt: list[int]) -> None:
    spec = SequenceSpec(
        f"other-{secrets.token_hex(8)}",
        tuple(prompt),
        SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        SequenceKind.LOCAL,
        tenant_salt=secrets.token_bytes(8),
    )
    stream = engine.submit(spec)
    try:
        while True:
            for event in await stream.get():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    return
    finally:
        engine.release(spec.seq_id)
