"""A device without torch whose tokens depend on the KV bytes it reads, so that missing, stale or foreign KV gives wrong tokens."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import numpy.typing as npt

from engine.errors import SequenceError
from engine.kv_cache import HostKvCache, KvLayout
from engine.sampling_params import SampledToken
from engine.step import Chunk, StepPlan, StepResult

FAKE_LAYOUT = KvLayout(model_fingerprint="fake", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4)
"""K and V of one token are 16 bytes each."""
VOCAB_SIZE = 1000
POISON_TOKEN = 999
"""A chunk that holds it fails alone."""


class FakeDevice:
    """Computes digests through the pool, and samples from them.

    `gate`, when set to an Event, is waited for at the start of every step (at most 30 s), so that a test can hold a step open.
    """

    def __init__(self, kv_cache: HostKvCache) -> None:
        self._kv_cache = kv_cache
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.plans: list[StepPlan] = []
        self.fail_next: BaseException | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a step."""
        self.entered.set()
        if self.gate is not None and not self.gate.wait(30):
            raise TimeoutError("nobody opened the gate")
        if self.fail_next is not None:
            raise self.fail_next
        self.plans.append(plan)
        for source, destination in plan.copies:
            self._kv_cache.blocks[destination] = self._kv_cache.blocks[source]
        sampled: list[SampledToken | None] = []
        failed: dict[int, Exception] = {}
        for index, chunk in enumerate(plan.chunks):
            if POISON_TOKEN in chunk.token_ids:
                failed[index] = SequenceError("poisoned")
                sampled.append(None)
                continue
            state = self._compute(chunk)
            sampled.append(self._sample(state, chunk) if chunk.sample else None)
        return StepResult(sampled, failed)

    def _compute(self, chunk: Chunk) -> bytes:
        """K and V of a token are a digest of all K and V before it, read from the pool, and of the token: attention that misses nothing."""
        seen = hashlib.sha256()
        for position in range(chunk.first_position):
            seen.update(self._slot(chunk, position).tobytes())
        for offset, token in enumerate(chunk.token_ids):
            key = seen.copy()
            key.update(token.to_bytes(4, "little"))
            slot = self._slot(chunk, chunk.first_position + offset)
            slot[:] = np.frombuffer(key.digest()[:16], np.uint8)
            seen.update(slot.tobytes())
        return seen.digest()

    def _slot(self, chunk: Chunk, position: int) -> npt.NDArray[np.uint8]:
        """K and V of a position, as [2, 16] bytes."""
        layout = self._kv_cache.layout
        block = self._kv_cache.blocks[chunk.block_table[position // layout.block_size]]
        slots: npt.NDArray[np.uint8] = block.reshape(2, layout.block_size, 16)
        return slots[:, position % layout.block_size]

    @staticmethod
    def _sample(state: bytes, chunk: Chunk) -> SampledToken:
        assert chunk.sample is not None
        params = chunk.sample.params
        key = state if params.greedy else state + params.seed.to_bytes(8, "little") + chunk.sample.position.to_bytes(8, "little")
        token = int.from_bytes(hashlib.sha256(key).digest()[:4], "little") % (VOCAB_SIZE - 1)
        return SampledToken(token, -1.0 if params.logprobs is not None else None)
