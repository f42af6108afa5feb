"""Decides what one step computes: a token for each that decodes, then prompt chunks as the policy says, within budgets. No tensor, no I/O, no clock."""

from __future__ import annotations

from bisect import insort

from engine.block_tables import BlockTables
from engine.errors import CapacityError
from engine.limits import EngineLimits
from engine.policies import POLICIES
from engine.sequence import Sequence, SequenceKind, SequenceState
from engine.step import Chunk, PromptRow, SampleRow, StepPlan


def step_owner(step_id: int) -> str:
    """Owner of the blocks that a step may touch and nobody else holds any more; they are given back when it is done."""
    return f"step:{step_id}"


class Scheduler:
    """Queue and running set over one block pool. Touched by the engine thread only."""

    def __init__(self, tables: BlockTables, limits: EngineLimits) -> None:
        self.tables = tables
        self.limits = limits
        self.policy = POLICIES[limits.scheduling_policy](limits)
        self.waiting: list[Sequence] = []
        """WAITING and PREEMPTED, by their turns; preempted ones keep theirs."""
        self.running: list[Sequence] = []
        """PREFILLING and DECODING, by (priority, arrival, sample)."""
        self.num_places_waiting_for_kv = 0
        self.num_preemptions = 0
        self.num_readmissions = 0
        self.preempted: list[Sequence] = []
        """Victims of the last `schedule`, for the engine to report."""
        self.readmitted: list[Sequence] = []
        """Those that got blocks in the last `schedule` and wait for KV now, for the engine to report."""

    @property
    def num_places_running(self) -> int:
        """Places of max_num_seqs that the running set takes: one for each sample."""
        return sum(each.num_places for each in self.running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that is computed here. Raises SequenceTooLongError."""
        self.tables.check_fits(sequence)
        sequence.turn = self.policy.turn(sequence)
        self._queue(sequence)

    def reserve(self, sequence: Sequence) -> None:
        """Takes all blocks of a sequence whose KV comes from elsewhere; it is not scheduled before `start_decoding`. Raises as calls.Reserve says.

        Places and blocks of the head of the queue are spared, unless this one comes before it: it waits for what reservations would go on taking.
        """
        self.tables.check_fits(sequence)
        sequence.turn = self.policy.turn(sequence)
        ahead = [each for each in self.waiting[:1] if each.turn < sequence.turn]
        num_places_left = self._num_places_left() - sum(each.num_places for each in ahead)
        if num_places_left < sequence.num_places:
            raise CapacityError("sequences", sequence.num_places, max(0, num_places_left))
        hits = self.tables.find_hits(sequence)
        self.tables.take(sequence, hits, sum(self.tables.need(each, self.tables.find_hits(each)).num_charged for each in ahead))
        sequence.num_cached_tokens = len(hits) * self.tables.block_size
        self.num_places_waiting_for_kv += sequence.num_places

    def start_decoding(self, sequence: Sequence) -> list[Sequence]:
        """The hand-over is confirmed: all KV of its tokens is here. Returns its samples, as sequences of their own."""
        self.num_places_waiting_for_kv -= sequence.num_places
        sequence.num_computed_tokens = sequence.prefill_target
        self.tables.mark_filled(sequence)
        samples = self.tables.fork(sequence)
        for each in samples:
            each.to(SequenceState.DECODING)
            _insert(self.running, each)
        return samples

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """Its prompt is computed: its samples, as sequences of their own, run on."""
        samples = self.tables.fork(sequence)
        for each in samples[1:]:
            _insert(self.running, each)
        return samples

    def remove(self, sequence: Sequence, owner: str | None = None) -> None:
        """Takes a sequence out, wherever it stands; its blocks are given back, or become those of `owner`. Its state is the caller's to set, afterwards."""
        if sequence.state is SequenceState.WAITING_FOR_KV:
            self.num_places_waiting_for_kv -= sequence.num_places
        elif sequence.state in (SequenceState.WAITING, SequenceState.PREEMPTED):
            self.waiting.remove(sequence)
        elif sequence.state in (SequenceState.PREFILLING, SequenceState.DECODING):
            self.running.remove(sequence)
        self.tables.give_back(sequence, owner)

    def hold(self, sequence: Sequence) -> None:
        """A computed prompt leaves the running set and keeps its blocks."""
        self.running.remove(sequence)
        sequence.to(SequenceState.HELD)

    def schedule(self, step_id: int) -> StepPlan | None:
        """Plans the next step; None when nothing can be computed. No step is in flight."""
        chunks: list[Chunk] = []
        copies: list[tuple[int, int]] = []
        self.preempted, self.readmitted = [], []
        # Growth preempts from the young end of the running set, so never a sequence that has its chunk already.
        for sequence in list(self.running):
            if sequence.state is SequenceState.DECODING and self._grow(sequence):
                self._copy(sequence, step_id, copies)
                chunks.append(self._chunk(sequence, 1))
        self._schedule_prompts(step_id, chunks, copies)
        return StepPlan(step_id, chunks, copies) if chunks else None

    def _schedule_prompts(self, step_id: int, chunks: list[Chunk], copies: list[tuple[int, int]]) -> None:
        """Those that have begun and those that wait share the budget, in the order of their turns."""
        begun = sorted((each for each in self.running if each.state is SequenceState.PREFILLING), key=_turn)
        if not begun and not self.waiting:
            return
        budget = left = min(self.policy.budget(len(chunks)), self.limits.max_num_batched_tokens - len(chunks))
        waits = not self.waiting
        while left > 0:
            if not waits and not (begun and begun[0].turn < self.waiting[0].turn):
                head = self.waiting[0]
                if self._num_places_left() < head.num_places or not self._admit(head):
                    waits = True  # and all behind it, whose turn comes later
                    continue
                if head.state is SequenceState.PREFILLING:
                    self._copy(head, step_id, copies)
                    left -= self._append_chunk(chunks, head, left)
                waits = not self.waiting
            elif begun:
                left -= self._append_chunk(chunks, begun.pop(0), left)
            else:
                break
        self.policy.scheduled(budget - left)

    def _queue(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_turn)

    def backlog_tokens(self) -> int:
        """Prompt tokens that wait to be computed."""
        prefilling = (each for each in self.running if each.state is SequenceState.PREFILLING)
        return sum(each.num_uncomputed_tokens for each in prefilling) + sum(each.num_uncomputed_tokens for each in self.waiting)

    def _num_places_left(self) -> int:
        return self.limits.max_num_seqs - self.num_places_running - self.num_places_waiting_for_kv

    def _append_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        num_tokens = min(budget, sequence.num_uncomputed_tokens)
        chunks.append(self._chunk(sequence, num_tokens))
        return num_tokens

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        first = sequence.num_computed_tokens
        rows: tuple[SampleRow, ...] = ()
        if num_tokens == sequence.num_uncomputed_tokens and sequence.num_output_tokens < sequence.spec.sampling.max_tokens:
            rows = tuple([SampleRow(params, sequence.num_tokens, sequence.token_ids, sequence.num_prompt_tokens) for params in sequence.samples])
        token_ids = sequence.token_ids[first : first + num_tokens]
        return Chunk(sequence.sample_id, token_ids, first, sequence.block_ids, rows, _prompt_row(sequence, num_tokens))

    def _copy(self, sequence: Sequence, step_id: int, copies: list[tuple[int, int]]) -> None:
        """Has the block copied that the sequence's next chunk writes into, if it shares that one with others."""
        if sequence.copy_source is not None:
            copies.append((sequence.copy_source, sequence.block_ids[sequence.num_computed_tokens // self.tables.block_size]))
            self.tables.pass_source(sequence, step_owner(step_id))
            sequence.copy_source = None

    def _admit(self, sequence: Sequence) -> bool:
        """Allocates a waiting sequence's blocks, all at once, and starts its prompt, or has it wait for its KV when that is too much to compute here."""
        hits = self.tables.find_hits(sequence)
        if not self._take_all_cached(sequence, hits) and not self.tables.try_take(sequence, hits):
            return False
        num_cached = len(hits) * self.tables.block_size
        # The last token must be computed for its logits.
        sequence.num_computed_tokens = num_cached if sequence.copy_source is None else sequence.num_tokens - 1
        self.waiting.remove(sequence)
        if self._is_too_long(sequence):
            sequence.to(SequenceState.WAITING_FOR_KV)
            self.num_places_waiting_for_kv += sequence.num_places
            self.num_readmissions += 1
            self.readmitted.append(sequence)
            return True
        if sequence.state is SequenceState.WAITING:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.announced = sequence.spec.kind is SequenceKind.PREFILL_ONLY and sequence.spec.hold
        sequence.to(SequenceState.PREFILLING)
        _insert(self.running, sequence)
        return True

    def _take_all_cached(self, sequence: Sequence, hits: list[int]) -> bool:
        """Takes the blocks of a sequence whose every token is cached: the last block as a copy, since its last token is written: never a shared block.

        False, with the last one no hit any more: in a full pool the source itself may be the block that is missing, and is computed instead.
        """
        if len(hits) * self.tables.block_size != sequence.num_tokens:
            return False
        source = hits.pop()
        self.tables.hold_source(sequence, source)
        if self.tables.try_take(sequence, hits):
            sequence.copy_source = source
            return True
        self.tables.drop_source(sequence)
        return False

    def _is_too_long(self, sequence: Sequence) -> bool:
        """Whether a sample that comes back is too long to be computed again here."""
        most = sequence.spec.max_recompute_tokens
        return most is not None and sequence.has_generated and sequence.copy_source is None and sequence.num_uncomputed_tokens > most

    def _grow(self, sequence: Sequence) -> bool:
        """Makes room for the token to compute next; preempts the youngest when the pool is full. False: it was this one itself."""
        while len(sequence.block_ids) * self.tables.block_size < sequence.num_tokens:
            if self.tables.pool.num_allocatable:
                self.tables.grow(sequence)
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
        self._queue(victim)
        self.num_preemptions += 1
        self.preempted.append(victim)


def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
    insort(sequences, sequence, key=lambda each: each.order)


def _turn(sequence: Sequence) -> tuple[float, ...]:
    return sequence.turn


def _prompt_row(sequence: Sequence, num_tokens: int) -> PromptRow | None:
    """Asks for those log probabilities of prompt tokens that the next `num_tokens` tokens give and that were not told yet."""
    num_alternatives, first = sequence.spec.sampling.prompt_logprobs, sequence.num_computed_tokens
    if num_alternatives is None or sequence.next_prompt_logprob >= sequence.num_prompt_tokens:
        return None
    targets = sequence.token_ids[first + 1 : min(first + num_tokens + 1, sequence.num_prompt_tokens)]
    return PromptRow(targets, num_alternatives) if first + len(targets) >= sequence.next_prompt_logprob else None
