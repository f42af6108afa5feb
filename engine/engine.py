"""One engine: calls in, events out, one step at a time. Everything here runs on the engine thread."""

from __future__ import annotations

import time
from collections import Counter

from engine import calls
from engine.block_pool import BlockPool
from engine.errors import EngineError, HoldBrokenError, SequenceTooLongError
from engine.events import ChunkComputed, Event, Failed, Finished, Preempted, Scheduled, Tokens
from engine.facts import ModelFacts
from engine.limits import EngineLimits
from engine.report import EngineLoad, EngineReport
from engine.sampling_params import Finish, FinishReason, SampledToken, finish_of
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceKind, SequenceSpec, SequenceState
from engine.step import Chunk, Device, StepPlan, StepResult


class Engine:
    """Schedules sequences over a device and a block pool.

    `handle` takes one call, `step` computes one step, `take_events` gives what happened since. A device error or a broken invariant
    leaves as an exception and is the engine's end; errors of one sequence end that sequence.
    """

    def __init__(self, model: ModelFacts, limits: EngineLimits, device: Device, *, num_blocks: int) -> None:
        self.model = model
        self.limits = limits
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(self.pool, limits, block_size=model.layout.block_size, max_model_len=model.max_model_len)
        self._device = device
        self._sequences: dict[str, Sequence] = {}
        self._readers: set[str] = set()
        self._events: list[tuple[str, Event]] = []
        self._arrivals = 0
        self._num_steps = 0
        self._num_late_steps = 0
        self._computed_prompt_tokens = 0
        self._generated_tokens = 0
        self._last_look_ns = 0
        self._last_step_ids: frozenset[str] = frozenset()

    @property
    def has_work(self) -> bool:
        """A step could compute something."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def take_events(self) -> list[tuple[str, Event]]:
        """Events since the last call, as (seq_id, event), in order."""
        events, self._events = self._events, []
        return events

    # Calls

    def handle(self, call: calls.Call) -> object:
        """Answers one call; raises what its docstring says."""
        match call:
            case calls.Submit(spec):
                self._submit(self._new_sequence(spec))
            case calls.Reserve(spec):
                return self._reserve(self._new_sequence(spec))
            case calls.Commit(seq_id, first):
                self._commit(self._require(seq_id, SequenceState.WAITING_FOR_KV), first)
            case calls.Release(seq_id, posted_ns):
                self._release(seq_id, posted_ns)
            case calls.Acquire():
                return self._acquire(call)
            case calls.Drop(reader_id):
                self._readers.discard(reader_id)
                self.pool.release(f"reader:{reader_id}")
            case calls.Confirm(seq_id, num_blocks):
                return self._confirm(seq_id, num_blocks)
            case calls.Report():
                return self.report()
        return None

    def _new_sequence(self, spec: SequenceSpec) -> Sequence:
        if spec.seq_id in self._sequences:
            raise EngineError(f"sequence {spec.seq_id} is there already")
        self._arrivals += 1
        layout = self.model.layout
        return Sequence(spec, block_size=layout.block_size, model_fingerprint=layout.model_fingerprint, arrival=self._arrivals)

    def _submit(self, sequence: Sequence) -> None:
        try:
            self.scheduler.add(sequence)
        except SequenceTooLongError as error:
            sequence.to(SequenceState.REJECTED)
            self._tell(sequence, Failed(error, time.monotonic_ns()))
            return
        self._sequences[sequence.seq_id] = sequence

    def _reserve(self, sequence: Sequence) -> calls.ReservedBlocks:
        reservation = self.scheduler.reserve(sequence)
        self._sequences[sequence.seq_id] = sequence
        num_prompt_blocks = self.scheduler.num_blocks_for(sequence.num_tokens)
        return calls.ReservedBlocks(tuple(sequence.block_ids), num_prompt_blocks, reservation.num_cached_blocks, reservation.num_charged_blocks)

    def _require(self, seq_id: str, state: SequenceState) -> Sequence:
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.state is not state:
            raise HoldBrokenError(f"sequence {seq_id} is {sequence.state.value if sequence else 'gone'}, not {state.value}")
        return sequence

    def _commit(self, sequence: Sequence, first: SampledToken) -> None:
        self.scheduler.start_decoding(sequence)
        sequence.token_ids.append(first.token_id)
        finish = self._finish_of(sequence, first.token_id)
        if finish is not None:
            self._end(sequence, SequenceState.FINISHED, Finished(finish, time.monotonic_ns()))

    def _release(self, seq_id: str, posted_ns: int) -> None:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            return
        if seq_id in self._last_step_ids and posted_ns < self._last_look_ns:
            self._num_late_steps += 1
        self._end(sequence, SequenceState.CANCELLED, None)

    def _acquire(self, call: calls.Acquire) -> tuple[int, ...]:
        sequence = self._sequences.get(call.seq_id)
        if sequence is None:
            raise HoldBrokenError(f"sequence {call.seq_id} is gone")
        if call.reader_id in self._readers:
            raise EngineError(f"reader {call.reader_id} is there already")
        last = call.first_block + call.num_blocks
        if call.first_block < 0 or call.num_blocks < 1 or last > self.scheduler.num_blocks_for(sequence.prefill_target):
            raise HoldBrokenError(f"blocks {call.first_block} to {last - 1} are not the prompt's")
        blocks = sequence.block_ids[call.first_block : last]
        if sequence.spec.kind is SequenceKind.REMOTE_KV:
            # The reader writes here: only while nothing else may read, and never into a block that the prefix cache shares.
            if sequence.state is not SequenceState.WAITING_FOR_KV or call.first_block < sequence.num_filled_blocks:
                raise HoldBrokenError(f"sequence {call.seq_id} does not wait for these blocks")
        elif len(blocks) != call.num_blocks or not all(self.pool.is_filled(block) for block in blocks):
            raise HoldBrokenError(f"blocks {call.first_block} to {last - 1} are not filled")
        self.pool.acquire(f"reader:{call.reader_id}", blocks)
        self._readers.add(call.reader_id)
        return tuple(blocks)

    def _confirm(self, seq_id: str, num_blocks: int) -> bool:
        sequence = self._sequences.get(seq_id)
        if sequence is None or sequence.state is not SequenceState.HELD or num_blocks != len(sequence.block_ids):
            return False
        # A table is frozen from its allocation on, and HELD follows only PREFILLING: the owner's blocks are those that were announced.
        unbroken = self.pool.blocks_of(sequence.owner) == tuple(sequence.block_ids)
        return unbroken and all(self.pool.is_filled(block) for block in sequence.block_ids)

    # Steps

    def step(self, looked_ns: int | None = None) -> bool:
        """Computes one step; False when nothing was computed and nobody preempted, and so nothing will be before the next call.

        `looked_ns` is when the caller began its last look for calls, which found none: a release posted before it, and not handled, makes the step late.
        """
        self._num_steps += 1
        now = time.monotonic_ns()
        plan = self.scheduler.schedule(self._num_steps)
        for victim in self.scheduler.preempted:
            self._tell(victim, Preempted(now))
        if plan is None:
            self._num_steps -= 1
            return bool(self.scheduler.preempted)
        for chunk in plan.chunks:
            sequence = self._sequences[chunk.seq_id]
            if sequence.first_scheduled_ns is None:
                sequence.first_scheduled_ns = now
                self._admit_reader(sequence)
                self._tell(sequence, Scheduled(now, sequence.num_cached_tokens, tuple(sequence.block_ids), sequence.num_charged_blocks))
        self._last_look_ns = now if looked_ns is None else looked_ns
        self._last_step_ids = frozenset(chunk.seq_id for chunk in plan.chunks)
        result = self._device.execute(plan)
        self._update(plan, result, now)
        return True

    def _admit_reader(self, sequence: Sequence) -> None:
        """A prefill-only sequence's table is whole and frozen from here on: its reader's references can be taken with it."""
        if sequence.spec.reader_id and sequence.spec.kind is SequenceKind.PREFILL_ONLY:
            self.pool.acquire(f"reader:{sequence.spec.reader_id}", sequence.block_ids)
            self._readers.add(sequence.spec.reader_id)

    def _update(self, plan: StepPlan, result: StepResult, started_ns: int) -> None:
        ended_ns = time.monotonic_ns()
        for index, chunk in enumerate(plan.chunks):
            sequence = self._sequences[chunk.seq_id]
            self.scheduler.release_copy_source(sequence)
            error = result.failed.get(index)
            if error is not None:
                self._end(sequence, SequenceState.FAILED, Failed(error, ended_ns))
                continue
            self._advance(sequence, chunk, started_ns, ended_ns)
            if sequence.num_uncomputed_tokens == 0:
                self._append(sequence, result.sampled[index], ended_ns)

    def _advance(self, sequence: Sequence, chunk: Chunk, started_ns: int, ended_ns: int) -> None:
        sequence.num_computed_tokens += len(chunk.token_ids)
        self.scheduler.mark_filled(sequence)
        if sequence.state is SequenceState.PREFILLING:
            self._computed_prompt_tokens += len(chunk.token_ids)
            complete = sequence.num_computed_tokens == sequence.prefill_target
            num_filled = self.scheduler.num_blocks_for(sequence.prefill_target) if complete else sequence.num_filled_blocks
            self._tell(sequence, ChunkComputed(started_ns, ended_ns, len(chunk.token_ids), num_filled))

    def _append(self, sequence: Sequence, token: SampledToken | None, at_ns: int) -> None:
        """All tokens are computed: takes the next one, and ends, holds or goes on."""
        if token is None:
            self._end(sequence, SequenceState.FINISHED, Finished(Finish(FinishReason.LENGTH), at_ns))
            return
        self._generated_tokens += 1
        self._tell(sequence, Tokens(sequence.num_output_tokens, (token,), at_ns))
        if sequence.spec.kind is SequenceKind.PREFILL_ONLY and sequence.spec.hold:
            self.scheduler.hold(sequence)
            return
        sequence.token_ids.append(token.token_id)
        finish = self._finish_of(sequence, token.token_id)
        if sequence.spec.kind is SequenceKind.PREFILL_ONLY:
            finish = finish or Finish(FinishReason.LENGTH)
        if finish is not None:
            self._end(sequence, SequenceState.FINISHED, Finished(finish, at_ns))
        elif sequence.state is SequenceState.PREFILLING:
            sequence.to(SequenceState.DECODING)

    def _finish_of(self, sequence: Sequence, token_id: int) -> Finish | None:
        num_output, num_tokens = sequence.num_output_tokens, sequence.num_tokens
        return finish_of(sequence.spec.sampling, self.model.eos_token_ids, token_id, num_output, num_tokens, self.model.max_model_len)

    def _end(self, sequence: Sequence, state: SequenceState, event: Event | None) -> None:
        if state is SequenceState.FAILED:
            # What it computed may be why it failed (logits that are no numbers): the next one with this prefix computes its own.
            self.pool.unname(sequence.block_ids)
        self.scheduler.remove(sequence)
        sequence.to(state)
        del self._sequences[sequence.seq_id]
        if event is not None:
            self._tell(sequence, event)

    def _tell(self, sequence: Sequence, event: Event) -> None:
        self._events.append((sequence.seq_id, event))

    # Reports

    def load(self) -> EngineLoad:
        """A snapshot; cheap enough for every step."""
        scheduler = self.scheduler
        num_held = len(self._sequences) - len(scheduler.running) - len(scheduler.waiting)
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_in_handover=num_held,
            backlog_tokens=scheduler.backlog_tokens(),
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_allocatable,
        )

    def report(self) -> EngineReport:
        """Everything, by owner and state. Verifies the ledger first unless sequences run: that looks at every block, and they would wait for it."""
        if not self.scheduler.running:
            self.check()
        return EngineReport(
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            num_held_blocks=self.pool.num_held,
            owners=self.pool.owners(),
            sequences_by_state=Counter(sequence.state.value for sequence in self._sequences.values()),
            num_readers=len(self._readers),
            computed_prompt_tokens=self._computed_prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_steps=self._num_steps,
            num_late_steps=self._num_late_steps,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def check(self) -> None:
        """Verifies the ledger, once whenever the engine falls idle; an AssertionError here ends the process."""
        self.pool.check()
        for owner in self.pool.owners():
            kind, _, name = owner.partition(":")
            assert name in (self._readers if kind == "reader" else self._sequences), f"{owner} holds blocks and is not there"
