"""Two engines and a hand-over between them under random calls in random order: nobody's tokens change, nothing stays held."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from engine import calls
from engine.errors import CapacityError
from engine.events import ChunkComputed, Event, Finished, Scheduled, Tokens
from engine.limits import EngineLimits
from engine.sampling_params import SamplingParams
from engine.sequence import SequenceKind, SequenceSpec
from tests.support.engines import FakeParts, fake_parts, run_alone, token_ids

_ids = itertools.count()


def a_spec(prompt: list[int], max_tokens: int, kind: SequenceKind, reader_id: str = "") -> SequenceSpec:
    return SequenceSpec(f"s{next(_ids)}", tuple(prompt), SamplingParams(max_tokens, temperature=0.0, ignore_eos=True), kind, reader_id=reader_id)


@dataclass
class Request:
    """One request on its way; `source` and `reserved` only when its prompt is computed elsewhere."""

    prompt: list[int]
    max_tokens: int
    target: SequenceSpec
    source: SequenceSpec | None = None
    reserved: calls.ReservedBlocks | None = None
    num_copied: int = 0
    tokens: list[int] = field(default_factory=list)
    committed: bool = False


class World:
    """Prefill, decode, and the requests between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        limits = EngineLimits(choose([2, 4, 8]), 32, choose([3, 8, 16]), choose([1, 4, 8]))
        self.prefill = fake_parts(num_blocks=choose([10, 16, 24]), max_model_len=40, limits=limits)
        self.decode = fake_parts(num_blocks=choose([10, 14, 24]), max_model_len=40, limits=limits)
        self.bases = [[self.random.randrange(900) for _ in range(24)] for _ in range(3)]
        self.requests: list[Request] = []
        self.events: defaultdict[str, list[Event]] = defaultdict(list)
        self.num_ended = 0

    def run(self, num_turns: int) -> None:
        for _ in range(num_turns):
            turn = self.random.random()
            if turn < 0.25 and len(self.requests) < 12:
                self.arrive()
            elif turn < 0.75:
                self.random.choice([self.prefill, self.decode]).engine.step()
            elif self.requests:
                self.advance(self.random.choice(self.requests))
            for parts in (self.prefill, self.decode):
                parts.engine.check()
                for seq_id, event in parts.engine.take_events():
                    self.events[seq_id].append(event)
        for request in list(self.requests):
            self.end(request)

    def arrive(self) -> None:
        """Prompts that often share a prefix; half of them are computed by decode itself."""
        length, base = self.random.randint(1, 24), self.random.choice(self.bases)
        num_own = self.random.choice([0, 0, length // 2])
        prompt = base[: length - num_own] + [self.random.randrange(900) for _ in range(num_own)]
        max_tokens = self.random.randint(2, 14)
        local = self.random.random() < 0.5
        request = Request(prompt, max_tokens, a_spec(prompt, max_tokens, SequenceKind.LOCAL if local else SequenceKind.REMOTE_KV))
        self.requests.append(request)
        if local:
            self.decode.engine.handle(calls.Submit(request.target))
            return
        try:
            reserved = self.decode.engine.handle(calls.Reserve(request.target))
        except CapacityError:
            self.end(request)
            return
        assert isinstance(reserved, calls.ReservedBlocks)
        request.reserved = reserved
        request.source = a_spec(prompt, max_tokens, SequenceKind.PREFILL_ONLY, request.target.seq_id)
        self.prefill.engine.handle(calls.Submit(request.source))
        num_left = reserved.num_prompt_blocks - reserved.num_cached_blocks
        if num_left:
            self.decode.engine.handle(calls.Acquire(request.target.seq_id, request.target.seq_id, reserved.num_cached_blocks, num_left))

    def advance(self, request: Request) -> None:
        """Cancels it, moves its hand-over on, or looks whether it has ended."""
        if self.random.random() < 0.08:
            self.end(request)
            return
        if request.source is not None and not request.committed:
            self.hand_over(request, request.source)
        events = self.events[request.target.seq_id]
        if events and isinstance(events[-1], Finished):
            assert request.tokens + token_ids(events) == expected(request.prompt, request.max_tokens)
            self.num_ended += 1
            self.end(request)

    def hand_over(self, request: Request, source: SequenceSpec) -> None:
        """Copies what is announced, and commits what is confirmed."""
        reserved, events = request.reserved, self.events[source.seq_id]
        assert reserved is not None
        num_filled = max((event.num_filled_blocks for event in events if isinstance(event, ChunkComputed)), default=0)
        for index in range(reserved.num_cached_blocks + request.num_copied, num_filled):
            block_ids = next(event.block_ids for event in events if isinstance(event, Scheduled))
            self.decode.kv_cache.blocks[reserved.block_ids[index]] = self.prefill.kv_cache.blocks[block_ids[index]]
            request.num_copied += 1
        first = [token for event in events if isinstance(event, Tokens) for token in event.tokens]
        if first:
            self.decode.engine.handle(calls.Drop(request.target.seq_id))
            assert self.prefill.engine.handle(calls.Confirm(source.seq_id, reserved.num_prompt_blocks)) is True
            self.decode.engine.handle(calls.Commit(request.target.seq_id, (first[0],)))
            request.committed = True
            request.tokens.append(first[0].token_id)
            release(self.prefill, source.seq_id, source.reader_id)

    def end(self, request: Request) -> None:
        """As a handler's `finally`."""
        self.requests.remove(request)
        release(self.decode, request.target.seq_id, request.target.seq_id)
        if request.source is not None:
            release(self.prefill, request.source.seq_id, request.source.reader_id)


def release(parts: FakeParts, seq_id: str, reader_id: str) -> None:
    parts.engine.handle(calls.Release(seq_id, 0))
    parts.engine.handle(calls.Drop(reader_id))


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """Tokens of an engine that computes this one sequence alone, with nothing cached."""
    parts = fake_parts(limits=EngineLimits(max_num_batched_tokens=64, max_prefill_tokens_per_step=64, enable_prefix_caching=False))
    tokens = run_alone(parts, a_spec(prompt, max_tokens, SequenceKind.LOCAL))
    parts.kv_cache.close()
    return tokens


@pytest.mark.parametrize("seed", range(30))
def test_random_interleavings_change_no_token_and_leave_nothing_held(seed: int) -> None:
    world = World(seed)
    world.run(400)
    for parts in (world.prefill, world.decode):
        assert parts.engine.report().nothing_held
        assert parts.engine.scheduler.num_places_waiting_for_kv == 0
        parts.kv_cache.close()
    assert world.num_ended > 0
