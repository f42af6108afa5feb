"""A device without torch whose tokens depend on the KV bytes it reads, so that missing, stale or foreign KV gives wrong tokens."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

import numpy as np
import numpy.typing as npt

from engine.errors import SequenceError
from engine.kv_cache import HostKvCache, KvLayout
from engine.sampling_params import SampledToken
from engine.step import Chunk, SampleRow, StepPlan, StepResult

FAKE_LAYOUT = KvLayout(model_fingerprint="fake", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4)
"""K and V of one token are 16 bytes each."""
VOCAB_SIZE = 1000
POISON_TOKEN = 999
"""A chunk that holds it fails alone."""


class FakeDevice:
    """Computes digests through the pool, and samples from them; steps run on a thread of its own.

    `gate`, when set to an Event, is waited for at the start of every step (at most 30 s), so that a test can hold a step open. A `late` device computes
    nothing, and touches no KV, before the test says `finish`.
    """

    def __init__(self, kv_cache: HostKvCache) -> None:
        self._kv_cache = kv_cache
        self._thread = ThreadPoolExecutor(1, "fake device")
        self._launched: tuple[StepPlan, Future[StepResult]] | None = None
        self.late = False
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.plans: list[StepPlan] = []
        self.fail_next: BaseException | None = None
        self.poisoned: tuple[str, int] | None = None
        """(sample id, position): the chunk that holds this position of this sample fails alone."""

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Implements engine.step.Device."""
        assert self._launched is None, "one step at a time"
        if not self.late:
            return self._thread.submit(self.execute, plan)
        future: Future[StepResult] = Future()
        self._launched = (plan, future)
        return future

    def close(self) -> None:
        """See engine.step.Device."""
        self._thread.shutdown()

    @property
    def touched(self) -> frozenset[int]:
        """Blocks that the launched step of a late device may read or write."""
        if self._launched is None:
            return frozenset()
        plan, size = self._launched[0], self._kv_cache.layout.block_size
        tables = (chunk.block_table[: -(-(chunk.first_position + len(chunk.token_ids)) // size)] for chunk in plan.chunks)
        return frozenset(chain(*tables, *plan.copies))

    def finish(self) -> None:
        """A late device computes what was launched, now."""
        assert self._launched is not None
        (plan, future), self._launched = self._launched, None
        future.set_result(self.execute(plan))

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
        sampled: list[tuple[SampledToken, ...]] = []
        failed: dict[int, Exception] = {}
        prompt_logprobs: dict[int, tuple[SampledToken, ...]] = {}
        for index, chunk in enumerate(plan.chunks):
            if self._is_poisoned(chunk):
                failed[index] = SequenceError("poisoned")
                sampled.append(())
                continue
            states = self._compute(chunk)
            sampled.append(tuple(_sample(states[-1], row) for row in chunk.samples))
            if chunk.prompt is not None:
                row = chunk.prompt
                prompt_logprobs[index] = tuple(_scored(state, token, row.num_alternatives) for state, token in zip(states, row.target_token_ids, strict=False))
        return StepResult(sampled, failed, prompt_logprobs)

    def _is_poisoned(self, chunk: Chunk) -> bool:
        positions = range(chunk.first_position, chunk.first_position + len(chunk.token_ids))
        return POISON_TOKEN in chunk.token_ids or (self.poisoned is not None and chunk.seq_id == self.poisoned[0] and self.poisoned[1] in positions)

    def _compute(self, chunk: Chunk) -> list[bytes]:
        """K and V of a token are a digest of all K and V before it, read from the pool, and of the token: attention that misses nothing.

        Returns the digest behind each token of the chunk.
        """
        seen, states = hashlib.sha256(), list[bytes]()
        for position in range(chunk.first_position):
            seen.update(self._slot(chunk, position).tobytes())
        for offset, token in enumerate(chunk.token_ids):
            key = seen.copy()
            key.update(token.to_bytes(4, "little"))
            slot = self._slot(chunk, chunk.first_position + offset)
            slot[:] = np.frombuffer(key.digest()[:16], np.uint8)
            seen.update(slot.tobytes())
            states.append(seen.digest())
        return states

    def _slot(self, chunk: Chunk, position: int) -> npt.NDArray[np.uint8]:
        """K and V of a position, as [2, 16] bytes."""
        layout = self._kv_cache.layout
        block = self._kv_cache.blocks[chunk.block_table[position // layout.block_size]]
        slots: npt.NDArray[np.uint8] = block.reshape(2, layout.block_size, 16)
        return slots[:, position % layout.block_size]


def _sample(state: bytes, row: SampleRow) -> SampledToken:
    params, key = row.params, state
    if not params.greedy:
        key += b"".join(number.to_bytes(8, "little") for number in (params.seed, params.sample_index, row.position))
    return _scored(state, _number(key) % (VOCAB_SIZE - 1), params.logprobs)


def _scored(state: bytes, token_id: int, num_alternatives: int | None) -> SampledToken:
    """A token and log probabilities that float32 holds exactly."""
    if num_alternatives is None:
        return SampledToken(token_id)
    others = [_number(state, number.to_bytes(4, "little")) % VOCAB_SIZE for number in range(num_alternatives)]
    return SampledToken(token_id, _logprob(state, token_id), tuple((other, _logprob(state, other)) for other in others))


def _logprob(state: bytes, token_id: int) -> float:
    return -(_number(state, token_id.to_bytes(4, "big")) % 65536) / 4096


def _number(*key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"".join(key)).digest()[:4], "little")
