"""Gives sequences their block tables and takes them back. No tensor, no I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.errors import CapacityError, SequenceTooLongError
from engine.limits import EngineLimits
from engine.sequence import Sequence, SequenceKind


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """What an allocation takes."""

    num_new: int
    """Empty blocks."""
    num_charged: int
    """Blocks that leave the set of allocatable ones: the new ones, and cached ones that nobody holds."""


class BlockTables:
    """Tables over one pool; each is owned as `sequence:<sample id>`. Touched by the engine thread only.

    A sequence of n samples gets all its tables at once: they share the prompt's full blocks, and the fork allocates nothing.
    """

    def __init__(self, pool: BlockPool, limits: EngineLimits, *, block_size: int, max_model_len: int) -> None:
        self.pool = pool
        self.limits = limits
        self.block_size = block_size
        self.max_model_len = max_model_len

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def check_fits(self, sequence: Sequence) -> None:
        """Raises SequenceTooLongError for a sequence that could not start, or one of whose samples could not end, even alone."""
        params = sequence.spec.sampling
        longest = min(sequence.num_prompt_tokens + params.max_tokens, self.max_model_len)
        if sequence.spec.kind is SequenceKind.PREFILL_ONLY:
            longest = sequence.num_tokens
        if sequence.num_tokens + (sequence.num_output_tokens < params.max_tokens) > self.max_model_len:
            raise SequenceTooLongError(f"{sequence.num_tokens} tokens and one more are over max_model_len ({self.max_model_len})")
        if sequence.num_places > self.limits.max_num_seqs:
            raise SequenceTooLongError(f"n = {sequence.num_places} samples are over max_num_seqs ({self.limits.max_num_seqs})")
        if self.num_blocks_for(longest) > self.pool.num_blocks:
            raise SequenceTooLongError(f"{longest} tokens take {self.num_blocks_for(longest)} blocks, the pool has {self.pool.num_blocks}")
        num_first = self.need(sequence, []).num_new
        if num_first > self.pool.num_blocks:
            raise SequenceTooLongError(f"n = {sequence.num_places} samples start with {num_first} blocks, the pool has {self.pool.num_blocks}")

    def find_hits(self, sequence: Sequence) -> list[int]:
        """Blocks of its longest prefix that is in the cache and may be taken from there."""
        return self.pool.find_prefix(sequence.hittable_names()) if self.limits.enable_prefix_caching else []

    def need(self, sequence: Sequence, hits: list[int]) -> BlockNeed:
        """What `take` takes: ceil(P/K) - hits + (n-1) [P mod K > 0] + n (ceil((P+out)/K) - ceil(P/K)) new blocks, as admission counts them."""
        num_in_table = self._num_blocks_in_table(sequence)
        num_shared = sequence.num_tokens // self.block_size
        num_new = num_in_table - len(hits) + (sequence.num_places - 1) * (num_in_table - num_shared)
        return BlockNeed(num_new, num_new + len(hits) - self.pool.num_held_among(hits))

    def take(self, sequence: Sequence, hits: list[int], num_spared: int = 0) -> None:
        """Gives it its tables, which begin with `hits`; all or nothing. `num_spared` allocatable blocks are left to others. Raises CapacityError."""
        need = self.need(sequence, hits)
        num_free = max(0, self.pool.num_allocatable - num_spared)
        if need.num_charged > num_free:
            raise CapacityError("blocks", need.num_charged, num_free)
        owner, *siblings = (_owner(sample_id) for sample_id in sequence.sample_ids)
        num_in_table = self._num_blocks_in_table(sequence)
        self.pool.acquire(owner, hits)
        sequence.block_ids = [*hits, *self.pool.allocate(owner, num_in_table - len(hits))]
        shared = sequence.block_ids[: sequence.num_tokens // self.block_size]
        for sibling in siblings:
            self.pool.acquire(sibling, shared)
            sequence.sibling_tables.append([*shared, *self.pool.allocate(sibling, num_in_table - len(shared))])
        sequence.num_charged_blocks = need.num_charged
        sequence.num_filled_blocks = len(hits)

    def try_take(self, sequence: Sequence, hits: list[int]) -> bool:
        """`take`, or False."""
        try:
            self.take(sequence, hits)
        except CapacityError:
            return False
        return True

    def grow(self, sequence: Sequence) -> None:
        """One more block; raises CapacityError."""
        sequence.block_ids.extend(self.pool.allocate(_owner(sequence.sample_id), 1))

    def give_back(self, sequence: Sequence, step_owner: str | None) -> None:
        """Takes all its blocks back: at once, or as `step_owner`'s when a step in flight may touch them."""
        for sample_id in sequence.sample_ids:
            for owner in (_owner(sample_id), _copy_owner(sample_id)):
                if step_owner is None:
                    self.pool.release(owner)
                else:
                    self.pool.transfer(owner, step_owner)
        # New lists: the step in flight has the old ones.
        sequence.block_ids, sequence.sibling_tables, sequence.copy_source = [], [], None

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The prompt is computed: one sequence for each sample; see Sequence.fork."""
        samples = sequence.fork()
        for each in samples:
            if each.copy_source is not None:
                self.hold_source(each, each.copy_source)
        return samples

    def hold_source(self, sequence: Sequence, block: int) -> None:
        """Keeps a block that this sequence's next step copies, until that step has it."""
        self.pool.acquire(_copy_owner(sequence.sample_id), [block])

    def drop_source(self, sequence: Sequence) -> None:
        """Nothing is copied after all."""
        self.pool.release(_copy_owner(sequence.sample_id))

    def pass_source(self, sequence: Sequence, step_owner: str) -> None:
        """The step copies it: the step keeps it."""
        self.pool.transfer(_copy_owner(sequence.sample_id), step_owner)

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

    def is_whole(self, sequence: Sequence) -> bool:
        """The pool's ledger says the same as its tables, and keeps the block that its next step copies."""
        tables = [sequence.block_ids, *sequence.sibling_tables] if sequence.block_ids else [[] for _ in sequence.sample_ids]
        owned = [list(self.pool.blocks_of(_owner(sample_id))) for sample_id in sequence.sample_ids]
        kept = [sequence.copy_source] if sequence.copy_source is not None else []
        return owned == tables and list(self.pool.blocks_of(_copy_owner(sequence.sample_id))) == kept

    def _num_blocks_in_table(self, sequence: Sequence) -> int:
        num_more = 0
        if sequence.spec.kind is not SequenceKind.PREFILL_ONLY:
            num_left = sequence.spec.sampling.max_tokens - sequence.num_output_tokens
            num_more = max(0, min(self.limits.reserve_output_tokens, num_left, self.max_model_len - sequence.num_tokens))
        return self.num_blocks_for(sequence.num_tokens + num_more)


def _owner(sample_id: str) -> str:
    return f"sequence:{sample_id}"


def _copy_owner(sample_id: str) -> str:
    return f"copy:{sample_id}"
