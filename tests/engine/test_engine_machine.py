"""One engine over a late device under every call in any order: nobody's tokens change, every sequence ends, nothing stays held."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine import calls
from engine.errors import CapacityError, SequenceTooLongError
from engine.events import Event, Failed, Finished, Readmitted, Tokens
from engine.limits import EngineLimits
from engine.sampling_params import SampledToken, SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from tests.support.engines import FakeParts, fake_parts, has_ended, prompt_logprobs, sampled_tokens
from tests.support.stepping import a_spec, assert_engine_empty, drain, expected_events, finish_step, late_parts, release, submit

MAX_MODEL_LEN = 28
BASES = tuple(tuple(range(100 * number, 100 * number + 20)) for number in range(2))
POISONED = 9
"""Every sequence number that this divides fails at some position."""


@dataclass(slots=True)
class Handover:
    """KV on its way into reserved blocks, of a whole sequence or of a readmitted sample."""

    sample_id: str
    index: int
    block_ids: tuple[int, ...]
    """Those of the tokens so far."""
    num_cached_blocks: int
    output: tuple[int, ...] = ()
    reader_id: str = ""


@dataclass(slots=True)
class Request:
    """One sequence as its owner sees it."""

    spec: SequenceSpec
    events: list[Event] = field(default_factory=list)
    first: dict[tuple[int, int], SampledToken] = field(default_factory=dict)
    """Tokens that came with a hand-over, by (sample, position)."""
    handovers: list[Handover] = field(default_factory=list)

    def tokens(self, index: int) -> list[SampledToken]:
        """What a sample has so far, from wherever."""
        told = {event.position: event.tokens[0] for event in self.events if isinstance(event, Tokens) and event.index == index}
        came = {position: token for (sample, position), token in self.first.items() if sample == index}
        assert not told.keys() & came.keys(), "a token was computed twice"
        found = told | came
        assert sorted(found) == list(range(len(found))), "positions have a gap"
        return [found[position] for position in range(len(found))]


@functools.cache
def alone(prompt: tuple[int, ...], sampling: SamplingParams, index: int) -> tuple[list[SampledToken], list[SampledToken]]:
    """The oracle: tokens and log probabilities of the prompt."""
    events = expected_events(list(prompt), sampling=sampling, index=index)
    return sampled_tokens(events, 0), prompt_logprobs(events)


class EngineMachine(RuleBasedStateMachine):
    """Rules are what owners and the device may do; the invariant is the ledger's, and the end is everybody's."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)
        self.requests: dict[str, Request] = {}
        self.in_flight = False

    @initialize(num_blocks=st.integers(8, 14), max_num_seqs=st.integers(4, 6), chunk=st.integers(3, 9), reserve=st.integers(1, 4))
    def start(self, num_blocks: int, max_num_seqs: int, chunk: int, reserve: int) -> None:
        limits = EngineLimits(max_num_seqs, 16, chunk, reserve)
        self.parts: FakeParts = late_parts(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, limits=limits)

    # Owners

    @rule(
        kind=st.sampled_from(SequenceKind),
        base=st.sampled_from(BASES),
        length=st.sampled_from([1, 3, 4, 6, 8, 11, 12, 16]),
        own=st.booleans(),
        n=st.integers(1, 4),
        max_tokens=st.integers(0, 10),
        logprobs=st.booleans(),
        most=st.sampled_from([None, 0, 3]),
        hold=st.booleans(),
    )
    def arrive(
        self, kind: SequenceKind, base: tuple[int, ...], length: int, own: bool, n: int, max_tokens: int, logprobs: bool, most: int | None, hold: bool
    ) -> None:
        number = next(self.numbers)
        prompt = (*base[:length], 900 + number % 90) if own else base[:length]
        sampling = SamplingParams(max_tokens, n, seed=number % 3, ignore_eos=True, logprobs=1, prompt_logprobs=1 if logprobs else None)
        spec = replace(a_spec(list(prompt), sampling=sampling, kind=kind, max_recompute_tokens=most, hold=hold), seq_id=f"r{number}")
        request = self.requests[spec.seq_id] = Request(spec)
        if number % POISONED == 0:
            self.parts.device.poisoned = (spec.seq_id, length)
        if kind is not SequenceKind.REMOTE_KV:
            submit(self.parts, spec)
            return
        try:
            reserved = self.parts.engine.handle(calls.Reserve(spec))
        except (CapacityError, SequenceTooLongError):
            del self.requests[spec.seq_id]
            return
        assert isinstance(reserved, calls.ReservedBlocks)
        request.handovers.append(Handover(spec.seq_id, 0, reserved.block_ids[: reserved.num_prompt_blocks], reserved.num_cached_blocks))

    def waiting(self) -> Iterator[tuple[Request, Handover]]:
        return ((request, each) for request in self.requests.values() for each in request.handovers)

    @precondition(lambda self: any(self.waiting()))
    @rule(choice=st.integers(0, 99))
    def acquire(self, choice: int) -> None:
        _, handover = self.choose(choice)
        num_left = len(handover.block_ids) - handover.num_cached_blocks
        if not handover.reader_id and num_left:
            handover.reader_id = f"reader-{next(self.numbers)}"
            call = calls.Acquire(handover.reader_id, handover.sample_id, handover.num_cached_blocks, num_left)
            assert self.parts.engine.handle(call) == handover.block_ids[handover.num_cached_blocks :]

    @precondition(lambda self: any(self.waiting()))
    @rule(choice=st.integers(0, 99))
    def commit(self, choice: int) -> None:
        request, handover = self.choose(choice)
        spec, whole = request.spec, handover.sample_id == request.spec.seq_id and not handover.output
        params = spec.sampling if whole else spec.sampling.of_sample(handover.index)
        first = self.fill(spec.prompt_token_ids, handover, params)
        self.parts.engine.handle(calls.Drop(handover.reader_id))
        if not first:  # max_tokens 0: nothing is ever committed
            self.leave(request)
            return
        request.handovers.remove(handover)
        for offset, token in enumerate(first):
            request.first[handover.index + offset, len(handover.output)] = token
        self.parts.engine.handle(calls.Commit(handover.sample_id, first))

    def fill(self, prompt: tuple[int, ...], handover: Handover, params: SamplingParams) -> tuple[SampledToken, ...]:
        """What a prefill instance computes, in the reserved blocks; the first tokens."""
        source = fake_parts()
        spec = submit(source, a_spec(list(prompt), sampling=params, kind=SequenceKind.PREFILL_ONLY, output_token_ids=handover.output))
        events = drain(source).get(spec.seq_id, [])
        from_blocks = source.engine.pool.blocks_of(f"sequence:{spec.seq_id}")
        for number in range(handover.num_cached_blocks, len(from_blocks)):
            self.parts.kv_cache.blocks[handover.block_ids[number]] = source.kv_cache.blocks[from_blocks[number]]
        source.kv_cache.close()
        return tuple(token for index in range(params.n) for token in sampled_tokens(events, index))

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 99))
    def cancel(self, choice: int) -> None:
        self.leave(list(self.requests.values())[choice % len(self.requests)])

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 99))
    def confirm(self, choice: int) -> None:
        request = list(self.requests.values())[choice % len(self.requests)]
        spec = request.spec
        confirmed = self.parts.engine.handle(calls.Confirm(spec.seq_id, -(-len(spec.prompt_token_ids) // 4)))
        has_tokens = any(isinstance(event, Tokens) for event in request.events)
        assert confirmed is (spec.kind is SequenceKind.PREFILL_ONLY and spec.hold and has_tokens)

    # Device

    @precondition(lambda self: not self.in_flight)
    @rule()
    def launch(self) -> None:
        self.in_flight = self.parts.engine.launch() is not None

    @precondition(lambda self: self.in_flight)
    @rule()
    def finish(self) -> None:
        finish_step(self.parts)
        self.in_flight = False

    # What holds after each of them

    @invariant()
    def the_ledger_adds_up(self) -> None:
        if not hasattr(self, "parts"):
            return
        self.parts.engine.check()
        held = {block for owner in self.parts.engine.pool.owners() for block in self.parts.engine.pool.blocks_of(owner)}
        assert self.parts.device.touched <= held, "a step in flight touches what can be handed out"
        for seq_id, event in self.parts.engine.take_events():
            request = self.requests.get(seq_id)
            if request is None:
                continue
            request.events.append(event)
            if isinstance(event, Readmitted):
                output = tuple(token.token_id for token in request.tokens(event.index))
                request.handovers.append(Handover(event.sample_id, event.index, event.block_ids[: event.num_prompt_blocks], event.num_cached_blocks, output))
        for request in list(self.requests.values()):
            self.look(request)

    def look(self, request: Request) -> None:
        """Leaves when it has ended, with what it should have."""
        spec, events = request.spec, request.events
        if not has_ended(events, spec.sampling.n):
            return
        failures = [event.error for event in events if isinstance(event, Failed)]
        ended = [event.index for event in events if isinstance(event, Finished)]
        assert not failures or events[-1] == next(event for event in events if isinstance(event, Failed))
        assert all(str(error) == "poisoned" or isinstance(error, SequenceTooLongError) for error in failures)
        for index in ended:
            tokens, scores = alone(spec.prompt_token_ids, spec.sampling, index)
            assert request.tokens(index) == (tokens[:1] if spec.kind is SequenceKind.PREFILL_ONLY else tokens)
            assert spec.kind is SequenceKind.REMOTE_KV or prompt_logprobs(events) == scores
        self.leave(request)

    # Parts of rules

    def choose(self, choice: int) -> tuple[Request, Handover]:
        waiting = list(self.waiting())
        return waiting[choice % len(waiting)]

    def leave(self, request: Request) -> None:
        """As a handler's `finally`."""
        release(self.parts, request.spec.seq_id)
        for handover in request.handovers:
            self.parts.engine.handle(calls.Drop(handover.reader_id))
        del self.requests[request.spec.seq_id]

    def teardown(self) -> None:
        if not hasattr(self, "parts"):
            return
        for _ in range(600):
            if self.in_flight:
                self.finish()
            self.launch()
            self.the_ledger_adds_up()
            if not self.in_flight:
                if not self.requests:
                    break
                self.settle()
        assert not self.requests, "sequences do not come to an end"
        assert_engine_empty(self.parts)
        self.parts.kv_cache.close()

    def settle(self) -> None:
        """Nothing can be computed: what is held is confirmed and let go, what waits for KV gets it."""
        for request in list(self.requests.values()):
            if request.spec.kind is SequenceKind.PREFILL_ONLY and any(isinstance(event, Tokens) for event in request.events):
                self.leave(request)
        if any(self.waiting()):
            self.commit(0)
        self.the_ledger_adds_up()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
