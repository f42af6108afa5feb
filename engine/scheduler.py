"""Decides what one step computes: decode first, then prompt chunks, under token budgets. No tensor, no I/O, no clock."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.errors import CapacityError, SequenceTooLongError
from engine.limits import EngineLimits
from engine.sequence import Sequence, SequenceKind, SequenceState
from engine.step import Chunk, SampleRow, StepPlan


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a sequence's allocation took."""

    num_cached_blocks: int
    """Leading blocks found in the prefix cache."""
    num_charged_blocks: int
    """Blocks that left the set of allocatable ones: new ones, and cached ones that nobody held."""


class Scheduler:
    """Queue and running set over one block pool. Touched by the engine thread only."""

    def __init__(self, pool: BlockPool, limits: EngineLimits, *, block_size: int, max_model_len: int) -> None:
        self.pool = pool
        self.limits = limits
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.waiting: list[Sequence] = []
        """By (priority, arrival); preempted ones keep their arrival."""
        self.running: list[Sequence] = []
        """PREFILLING and DECODING, by (priority, arrival)."""
        self.num_waiting_for_kv = 0
        self.num_preemptions = 0
        self.preempted: list[Sequence] = []
        """Victims of the last `schedule`, for the engine to report."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def check_fits(self, sequence: Sequence) -> None:
        """Raises SequenceTooLongError for a sequence that could not finish even alone."""
        params = sequence.spec.sampling
        longest = min(sequence.num_prompt_tokens + params.max_tokens, self.max_model_len)
        if sequence.spec.kind is SequenceKind.PREFILL_ONLY:
            longest = sequence.num_tokens
        if sequence.num_tokens + (sequence.num_output_tokens < params.max_tokens) > self.max_model_len:
            raise SequenceTooLongError(f"{sequence.num_tokens} tokens and one more are over max_model_len ({self.max_model_len})")
        if self.num_blocks_for(longest) > self.pool.num_blocks:
            raise SequenceTooLongError(f"{longest} tokens take {self.num_blocks_for(longest)} blocks, the pool has {self.pool.num_blocks}")

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that is computed here."""
        self.check_fits(sequence)
        insort(self.waiting, sequence, key=lambda each: each.order)

    def reserve(self, sequence: Sequence) -> Reservation:
        """Takes all blocks of a sequence whose KV comes from elsewhere; it is not scheduled before `start_decoding`. Raises CapacityError.

        Place and blocks of the head of the queue are spared, unless this one comes before it: it waits for what reservations would go on taking.
        """
        self.check_fits(sequence)
        ahead = [each for each in self.waiting[:1] if each.order < sequence.order]
        if self._num_places_left() < 1 + len(ahead):
            raise CapacityError("sequences", 1, 0)
        hits = self._full_block_hits(sequence)
        num_spared = sum(self._num_blocks_to_take(each, self._full_block_hits(each))[1] for each in ahead)
        reservation = self._take_blocks(sequence, hits, num_spared)
        sequence.num_cached_tokens = len(hits) * self.block_size
        sequence.num_filled_blocks = len(hits)
        self.num_waiting_for_kv += 1
        return reservation

    def start_decoding(self, sequence: Sequence) -> None:
        """The hand-over is confirmed: all KV of the prompt is here."""
        self.num_waiting_for_kv -= 1
        sequence.num_computed_tokens = sequence.prefill_target
        self.mark_filled(sequence)
        sequence.to(SequenceState.DECODING)
        insort(self.running, sequence, key=lambda each: each.order)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands, and gives its blocks back. Its state is the caller's to set, afterwards."""
        if sequence.state is SequenceState.WAITING_FOR_KV:
            self.num_waiting_for_kv -= 1
        elif sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED):
            self.waiting.remove(sequence)
        elif sequence.state in (SequenceState.PREFILLING, SequenceState.DECODING):
            self.running.remove(sequence)
        self.pool.release(sequence.owner)
        sequence.block_ids = []

    def hold(self, sequence: Sequence) -> None:
        """A computed prompt leaves the running set and keeps its blocks."""
        self.running.remove(sequence)
        sequence.to(SequenceState.HELD)

    def schedule(self, step_id: int) -> StepPlan | None:
        """Plans the next step; None when nothing can be computed."""
        copies: list[tuple[int, int]] = []
        self.preempted = []
        # Growth preempts from the young end of the running set, so never a sequence that has its chunk already.
        chunks = [self._chunk(each, 1) for each in list(self.running) if each.state is SequenceState.DECODING and self._grow(each)]
        budget = min(self.limits.max_prefill_tokens_per_step, self.limits.max_num_batched_tokens - len(chunks))
        for sequence in self.running:
            if budget > 0 and sequence.state is SequenceState.PREFILLING:
                budget -= self._append_chunk(chunks, sequence, budget)
        while budget > 0 and self.waiting and self._num_places_left() > 0:
            sequence = self.waiting[0]
            if not self._admit(sequence, copies):
                break
            budget -= self._append_chunk(chunks, sequence, budget)
        return StepPlan(step_id, chunks, copies) if chunks else None

    def mark_filled(self, sequence: Sequence) -> None:
        """Marks the blocks that computed tokens have completed; the last, partly used one once all prompt work is done (no name: it cannot be hit)."""
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full > sequence.num_filled_blocks:
            names = sequence.block_names(num_full)
            for index in range(sequence.num_filled_blocks, num_full):
                self.pool.mark_filled(sequence.block_ids[index], names[index] if self.limits.enable_prefix_caching else None)
            sequence.num_filled_blocks = num_full
        if sequence.num_computed_tokens == sequence.prefill_target and sequence.prefill_target % self.block_size:
            self.pool.mark_filled(sequence.block_ids[num_full], None)

    def backlog_tokens(self) -> int:
        """Prompt tokens that wait to be computed."""
        prefilling = (each for each in self.running if each.state is SequenceState.PREFILLING)
        return sum(each.num_uncomputed_tokens for each in prefilling) + sum(each.num_uncomputed_tokens for each in self.waiting)

    def _num_places_left(self) -> int:
        return self.limits.max_num_seqs - len(self.running) - self.num_waiting_for_kv

    def _append_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        num_tokens = min(budget, sequence.num_uncomputed_tokens)
        chunks.append(self._chunk(sequence, num_tokens))
        return num_tokens

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        first = sequence.num_computed_tokens
        params = sequence.spec.sampling
        samples = num_tokens == sequence.num_uncomputed_tokens and sequence.num_output_tokens < params.max_tokens
        row = SampleRow(params, sequence.num_tokens, sequence.token_ids, sequence.num_prompt_tokens) if samples else None
        return Chunk(sequence.seq_id, sequence.token_ids[first : first + num_tokens], first, sequence.block_ids, row)

    def _admit(self, sequence: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Allocates a waiting sequence's blocks, all at once, and starts its prompt."""
        hits = self._full_block_hits(sequence)
        # The last token must be computed for its logits. When even it is cached, the last block is copied and the copy written: never a shared block.
        copied = hits.pop() if len(hits) * self.block_size == sequence.num_tokens else None
        if copied is not None:
            self.pool.acquire(self._copy_owner(sequence), [copied])
            if not self._try_take_blocks(sequence, hits):
                # In a full pool the source itself may be the block that is missing: compute the last block instead.
                self.pool.release(self._copy_owner(sequence))
                copied = None
        if copied is None and not self._try_take_blocks(sequence, hits):
            return False
        sequence.num_computed_tokens = len(hits) * self.block_size
        sequence.num_filled_blocks = len(hits)
        if copied is not None:
            copies.append((copied, sequence.block_ids[len(hits)]))
            sequence.num_computed_tokens = sequence.num_tokens - 1
        if sequence.state is SequenceState.WAITING:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.announced = sequence.spec.kind is SequenceKind.PREFILL_ONLY and sequence.spec.hold
        self.waiting.remove(sequence)
        sequence.to(SequenceState.PREFILLING)
        insort(self.running, sequence, key=lambda each: each.order)
        return True

    def release_copy_source(self, sequence: Sequence) -> None:
        """The step that copied a shared block for this sequence has completed."""
        self.pool.release(self._copy_owner(sequence))

    @staticmethod
    def _copy_owner(sequence: Sequence) -> str:
        return f"copy:{sequence.seq_id}"

    def _full_block_hits(self, sequence: Sequence) -> list[int]:
        if not self.limits.enable_prefix_caching:
            return []
        return self.pool.find_prefix(sequence.block_names(sequence.num_tokens // self.block_size))

    def _try_take_blocks(self, sequence: Sequence, hits: list[int]) -> bool:
        try:
            self._take_blocks(sequence, hits)
        except CapacityError:
            return False
        return True

    def _take_blocks(self, sequence: Sequence, hits: list[int], num_spared: int = 0) -> Reservation:
        num_new, num_charged = self._num_blocks_to_take(sequence, hits)
        num_free = max(0, self.pool.num_allocatable - num_spared)
        if num_charged > num_free:
            raise CapacityError("blocks", num_charged, num_free)
        self.pool.acquire(sequence.owner, hits)
        sequence.block_ids = [*hits, *self.pool.allocate(sequence.owner, num_new)]
        sequence.num_charged_blocks = num_charged
        return Reservation(len(hits), num_charged)

    def _num_blocks_to_take(self, sequence: Sequence, hits: list[int]) -> tuple[int, int]:
        """New blocks, and blocks that leave the set of allocatable ones: the new ones, and hits that nobody holds."""
        num_more = 0
        if sequence.spec.kind is not SequenceKind.PREFILL_ONLY:
            num_left = sequence.spec.sampling.max_tokens - sequence.num_output_tokens
            num_more = max(0, min(self.limits.reserve_output_tokens, num_left, self.max_model_len - sequence.num_tokens))
        num_new = self.num_blocks_for(sequence.num_tokens + num_more) - len(hits)
        return num_new, num_new + len(hits) - self.pool.num_held_among(hits)

    def _grow(self, sequence: Sequence) -> bool:
        """Makes room for the token to compute next; preempts the youngest when the pool is full. False: it was this one itself."""
        while len(sequence.block_ids) * self.block_size < sequence.num_tokens:
            if self.pool.num_allocatable:
                sequence.block_ids.extend(self.pool.allocate(sequence.owner, 1))
                continue
            # The youngest whose blocks nobody was told of; there is one, since a decoding sequence announces nothing.
            victim = next(each for each in reversed(self.running) if not each.announced)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.remove(victim)
        victim.to(SequenceState.PREEMPTED)
        victim.num_computed_tokens = 0
        victim.num_filled_blocks = 0
        victim.prefill_target = victim.num_tokens
        insort(self.waiting, victim, key=lambda each: each.order)
        self.num_preemptions += 1
        self.preempted.append(victim)
