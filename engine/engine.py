"""One engine: calls in, events out, one step at a time. Everything here runs on the engine thread."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container
from concurrent.futures import Future
from dataclasses import dataclass

from engine import calls
from engine.block_pool import BlockPool
from engine.block_tables import BlockTables
from engine.errors import EngineError, HoldBrokenError, SequenceTooLongError
from engine.events import ChunkComputed, Event, Failed, Finished, Preempted, PromptLogprobs, Readmitted, Scheduled, Tokens
from engine.facts import ModelFacts
from engine.limits import EngineLimits
from engine.live_sequences import LiveSequences
from engine.report import EngineLoad, EngineReport
from engine.sampling_params import Finish, FinishReason, SampledToken, SamplingParams, finish_of
from engine.scheduler import Scheduler, step_owner
from engine.sequence import TERMINAL, Sequence, SequenceKind, SequenceSpec, SequenceState
from engine.step import Chunk, Device, StepPlan, StepResult

_MAX_STEP_S = 60.0
"""Bound of `Engine.step`."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that the device has and that is not completed."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    """One for each chunk. A name alone would not do: a sequence may end, and its name be given anew, while the step runs."""
    num_prompt_tokens: int
    """Tokens among its chunks' that are prompt work."""
    started_ns: int
    future: Future[StepResult]


class Engine:
    """Schedules sequences over a device and a block pool.

    `handle` takes one call, `launch` and `complete` compute one step, `take_events` gives what happened since. Calls may come between the two: blocks of a
    sequence that ends meanwhile are the step's until it is completed. A device error or a broken invariant leaves as an exception and is the engine's end;
    errors of one sequence end that sequence.
    """

    def __init__(self, model: ModelFacts, limits: EngineLimits, device: Device, *, num_blocks: int, generations: memoryview | None = None) -> None:
        """`generations` as of BlockPool: a table beside the pool's memory."""
        self.model = model
        self.limits = limits
        self.pool = BlockPool(num_blocks, generations)
        self.tables = BlockTables(self.pool, limits, block_size=model.layout.block_size, max_model_len=model.max_model_len)
        self.scheduler = Scheduler(self.tables, limits)
        self._device = device
        self._sequences = LiveSequences()
        self._readers: set[str] = set()
        self._events: list[tuple[str, Event]] = []
        self._flight: StepInFlight | None = None
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

    @property
    def has_events(self) -> bool:
        """`take_events` would give some."""
        return bool(self._events)

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
        self._arrivals += 1
        layout = self.model.layout
        sequence = Sequence(spec, block_size=layout.block_size, model_fingerprint=layout.model_fingerprint, arrival=self._arrivals)
        self._sequences.check_new(sequence)
        return sequence

    def _submit(self, sequence: Sequence) -> None:
        try:
            self.scheduler.add(sequence)
        except SequenceTooLongError as error:
            sequence.to(SequenceState.REJECTED)
            self._tell(sequence, Failed(error, time.monotonic_ns()))
            return
        self._sequences.add(sequence)

    def _reserve(self, sequence: Sequence) -> calls.ReservedBlocks:
        self.scheduler.reserve(sequence)
        self._sequences.add(sequence)
        num_prompt_blocks = self.tables.num_blocks_for(sequence.num_tokens)
        return calls.ReservedBlocks(sequence.all_block_ids, num_prompt_blocks, sequence.num_filled_blocks, sequence.num_charged_blocks)

    def _require(self, sample_id: str, state: SequenceState) -> Sequence:
        sequence = self._sequences.sample(sample_id)
        if sequence is None or sequence.state is not state:
            raise HoldBrokenError(f"sequence {sample_id} is {sequence.state.value if sequence else 'gone'}, not {state.value}")
        return sequence

    def _commit(self, sequence: Sequence, first: tuple[SampledToken, ...]) -> None:
        if len(first) != len(sequence.samples):
            raise EngineError(f"{len(first)} first tokens for the {len(sequence.samples)} samples of sequence {sequence.sample_id}")
        now = time.monotonic_ns()
        samples = self.scheduler.start_decoding(sequence)
        self._sequences.forked(samples)
        for sample, token in zip(samples, first, strict=True):
            self._append(sample, token, now)

    def _release(self, seq_id: str, posted_ns: int) -> None:
        samples = self._sequences.samples_of(seq_id)
        if samples and seq_id in self._last_step_ids and posted_ns < self._last_look_ns:
            self._num_late_steps += 1
        for sample in samples:
            self._end(sample, SequenceState.CANCELLED)

    def _acquire(self, call: calls.Acquire) -> tuple[int, ...]:
        sequence = self._sequences.sample(call.seq_id)
        if sequence is None:
            raise HoldBrokenError(f"sequence {call.seq_id} is gone")
        if call.reader_id in self._readers:
            raise EngineError(f"reader {call.reader_id} is there already")
        last = call.first_block + call.num_blocks
        if call.first_block < 0 or call.num_blocks < 1 or last > self.tables.num_blocks_for(sequence.prefill_target):
            raise HoldBrokenError(f"blocks {call.first_block} to {last - 1} are not the prompt's")
        blocks = sequence.block_ids[call.first_block : last]
        if sequence.state is SequenceState.WAITING_FOR_KV or sequence.spec.kind is SequenceKind.REMOTE_KV:
            # The reader writes here: only while nothing else may read, and never into a block that the prefix cache shares.
            if sequence.state is not SequenceState.WAITING_FOR_KV or call.first_block < sequence.num_filled_blocks:
                raise HoldBrokenError(f"sequence {call.seq_id} does not wait for these blocks")
        elif len(blocks) != call.num_blocks or not all(self.pool.is_filled(block) for block in blocks):
            raise HoldBrokenError(f"blocks {call.first_block} to {last - 1} are not filled")
        self.pool.acquire(f"reader:{call.reader_id}", blocks)
        self._readers.add(call.reader_id)
        return tuple(blocks)

    def _confirm(self, seq_id: str, num_blocks: int) -> bool:
        sequence = self._sequences.sample(seq_id)
        if sequence is None or sequence.state is not SequenceState.HELD or num_blocks != len(sequence.block_ids):
            return False
        # A table is frozen from its allocation on, and HELD follows only PREFILLING: the owner's blocks are those that were announced.
        return self.tables.is_whole(sequence) and all(self.pool.is_filled(block) for block in sequence.block_ids)

    # Steps

    def launch(self, looked_ns: int | None = None) -> Future[StepResult] | None:
        """Launches a step; None when nothing can be computed, nor will be before the next call. Only when none is in flight.

        `looked_ns` is when the caller began its last look for calls, which found none: a release posted before it, and not handled, makes the step late.
        """
        assert self._flight is None, "a step is in flight"
        now = time.monotonic_ns()
        plan = self.scheduler.schedule(self._num_steps + 1)
        self._tell_moves(now)
        if plan is None:
            return None
        self._num_steps += 1
        sequences = tuple(self._planned(chunk, now) for chunk in plan.chunks)
        prompt_work = (len(chunk.token_ids) for chunk, each in zip(plan.chunks, sequences, strict=True) if each.state is SequenceState.PREFILLING)
        self._last_look_ns = now if looked_ns is None else looked_ns
        self._last_step_ids = frozenset(sequence.seq_id for sequence in sequences)
        self._flight = StepInFlight(plan, sequences, sum(prompt_work), now, self._device.launch(plan))
        return self._flight.future

    def complete(self) -> None:
        """Takes the result of the step in flight, which is done. Raises what ended it."""
        flight = self._flight
        assert flight is not None and flight.future.done(), "no step is done"
        self._flight = None
        result = flight.future.result()
        ended_ns = time.monotonic_ns()
        self.pool.release(step_owner(flight.plan.step_id))
        self._computed_prompt_tokens += flight.num_prompt_tokens
        for index, (chunk, sequence) in enumerate(zip(flight.plan.chunks, flight.sequences, strict=True)):
            if sequence.state in TERMINAL:  # released while the step ran, or failed with another of its samples
                continue
            error = result.failed.get(index)
            if error is not None:
                self._fail(sequence, error, ended_ns)
                continue
            self._advance(sequence, chunk, flight.started_ns, ended_ns)
            if chunk.prompt is not None:
                found = result.prompt_logprobs[index]
                assert len(found) == len(chunk.prompt.target_token_ids), "the device left out log probabilities of prompt tokens"
                self._tell_prompt_logprobs(sequence, chunk.first_position, found)
            if sequence.num_uncomputed_tokens == 0:
                self._take_tokens(sequence, result.sampled[index], ended_ns)

    def step(self, looked_ns: int | None = None) -> bool:
        """Launches a step, waits for it and completes it; False when nothing happened. For programs without an engine thread."""
        future = self.launch(looked_ns)
        if future is None:
            return self.has_events
        future.exception(_MAX_STEP_S)
        self.complete()
        return True

    def close(self) -> None:
        """Ends the device, behind a step in flight."""
        self._device.close()

    def _tell_moves(self, now: int) -> None:
        """What the scheduler did to sequences besides planning their chunks."""
        for victim in self.scheduler.preempted:
            self._tell(victim, Preempted(now, victim.index))
        for each in self.scheduler.readmitted:
            num_blocks = self.tables.num_blocks_for(each.num_tokens)
            self._tell(each, Readmitted(now, each.index, each.sample_id, tuple(each.block_ids), num_blocks, each.num_filled_blocks))

    def _planned(self, chunk: Chunk, now: int) -> Sequence:
        """The sequence of a planned chunk; its owner hears of the first one."""
        sequence = self._sequences.sample(chunk.seq_id)
        assert sequence is not None, f"a chunk is planned for {chunk.seq_id}, which is gone"
        if sequence.first_scheduled_ns is None and sequence.spec.kind is not SequenceKind.REMOTE_KV:
            sequence.first_scheduled_ns = now
            self._admit_reader(sequence)
            self._tell(sequence, Scheduled(now, sequence.num_cached_tokens, sequence.all_block_ids, sequence.num_charged_blocks))
        return sequence

    def _admit_reader(self, sequence: Sequence) -> None:
        """A prefill-only sequence's table is whole and frozen from here on: its reader's references can be taken with it."""
        if sequence.spec.reader_id and sequence.spec.kind is SequenceKind.PREFILL_ONLY:
            self.pool.acquire(f"reader:{sequence.spec.reader_id}", sequence.block_ids)
            self._readers.add(sequence.spec.reader_id)

    def _advance(self, sequence: Sequence, chunk: Chunk, started_ns: int, ended_ns: int) -> None:
        sequence.num_computed_tokens += len(chunk.token_ids)
        self.tables.mark_filled(sequence)
        if sequence.state is SequenceState.PREFILLING:
            complete = sequence.num_computed_tokens == sequence.prefill_target
            num_filled = self.tables.num_blocks_for(sequence.prefill_target) if complete else sequence.num_filled_blocks
            self._tell(sequence, ChunkComputed(started_ns, ended_ns, len(chunk.token_ids), num_filled))

    def _tell_prompt_logprobs(self, sequence: Sequence, first_position: int, found: tuple[SampledToken, ...]) -> None:
        """Tells those that were not told before the sequence was preempted."""
        num_told = sequence.next_prompt_logprob - (first_position + 1)
        self._tell(sequence, PromptLogprobs(found[num_told:]))
        sequence.next_prompt_logprob += len(found) - num_told

    def _take_tokens(self, sequence: Sequence, tokens: tuple[SampledToken, ...], at_ns: int) -> None:
        """All tokens are computed: takes the next one of each sample, and ends, holds or goes on."""
        if not tokens:
            self._end(sequence, SequenceState.FINISHED)
            for index in range(len(sequence.samples)):
                self._tell(sequence, Finished(Finish(FinishReason.LENGTH), at_ns, index))
            return
        self._generated_tokens += len(tokens)
        if sequence.spec.kind is SequenceKind.PREFILL_ONLY:
            self._take_first_tokens(sequence, tokens, at_ns)
            return
        samples = [sequence]
        if len(sequence.samples) > 1:
            samples = self.scheduler.fork(sequence)
            self._sequences.forked(samples)
        for sample, token in zip(samples, tokens, strict=True):
            self._tell(sample, Tokens(sample.num_output_tokens, (token,), at_ns, sample.index))
            self._append(sample, token, at_ns)

    def _take_first_tokens(self, sequence: Sequence, tokens: tuple[SampledToken, ...], at_ns: int) -> None:
        """The prompt of a sequence that goes on in another pool, if at all."""
        for index, token in enumerate(tokens):
            self._tell(sequence, Tokens(sequence.num_output_tokens, (token,), at_ns, index))
        if sequence.spec.hold:
            self.scheduler.hold(sequence)
            return
        self._end(sequence, SequenceState.FINISHED)
        for index, (params, token) in enumerate(zip(sequence.samples, tokens, strict=True)):
            finish = self._finish_of(sequence, params, token) or Finish(FinishReason.LENGTH)
            self._tell(sequence, Finished(finish, at_ns, index))

    def _append(self, sample: Sequence, token: SampledToken, at_ns: int) -> None:
        """A sample's next token, which ends it or not."""
        finish = self._finish_of(sample, sample.samples[0], token)
        sample.token_ids.append(token.token_id)
        if finish is not None:
            self._end(sample, SequenceState.FINISHED)
            self._tell(sample, Finished(finish, at_ns, sample.index))
        elif sample.state is SequenceState.PREFILLING:
            sample.to(SequenceState.DECODING)

    def _finish_of(self, sequence: Sequence, params: SamplingParams, token: SampledToken) -> Finish | None:
        """Whether a sample ends with this next token."""
        num_output, num_tokens = sequence.num_output_tokens + 1, sequence.num_tokens + 1
        return finish_of(params, self.model.eos_token_ids, token.token_id, num_output, num_tokens, self.model.max_model_len)

    def _fail(self, sequence: Sequence, error: Exception, at_ns: int) -> None:
        """An error of one sample ends them all."""
        # What it computed may be why it failed (logits that are no numbers): the next one with this prefix computes its own.
        self.pool.unname(sequence.block_ids)
        for sample in self._sequences.samples_of(sequence.seq_id):
            self._end(sample, SequenceState.FAILED)
        self._tell(sequence, Failed(error, at_ns))

    def _end(self, sequence: Sequence, state: SequenceState) -> None:
        flight = self._flight
        touched = flight is not None and any(each is sequence for each in flight.sequences)
        self.scheduler.remove(sequence, step_owner(flight.plan.step_id) if flight is not None and touched else None)
        sequence.to(state)
        self._sequences.remove(sequence)

    def _tell(self, sequence: Sequence, event: Event) -> None:
        self._events.append((sequence.seq_id, event))

    # Reports

    def load(self) -> EngineLoad:
        """A snapshot; cheap enough for every step."""
        scheduler = self.scheduler
        num_held = sum(each.state is SequenceState.HELD for each in self._sequences)
        return EngineLoad(
            num_running=scheduler.num_places_running,
            num_waiting=len(scheduler.waiting),
            num_in_handover=scheduler.num_places_waiting_for_kv + num_held,
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
            sequences_by_state=Counter(sequence.state.value for sequence in self._sequences),
            num_readers=len(self._readers),
            computed_prompt_tokens=self._computed_prompt_tokens,
            generated_tokens=self._generated_tokens,
            num_steps=self._num_steps,
            num_late_steps=self._num_late_steps,
            num_preemptions=self.scheduler.num_preemptions,
            num_readmissions=self.scheduler.num_readmissions,
        )

    def check(self) -> None:
        """Verifies the ledger, once whenever the engine falls idle; an AssertionError here ends the process."""
        self.pool.check()
        steps = {str(self._flight.plan.step_id)} if self._flight is not None else set()
        known: dict[str, Container[str]] = {"sequence": self._sequences, "copy": self._sequences, "reader": self._readers, "step": steps}
        for owner in self.pool.owners():
            kind, _, name = owner.partition(":")
            assert name in known[kind], f"{owner} holds blocks and is not there"
        for sequence in self._sequences:
            assert self.tables.is_whole(sequence), f"tables of sequence {sequence.sample_id} and the pool's ledger differ"
