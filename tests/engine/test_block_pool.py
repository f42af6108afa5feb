"""The ledger of blocks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool
from engine.errors import CapacityError


def test_allocation_is_all_or_none() -> None:
    pool = BlockPool(4)
    pool.allocate("sequence:a", 3)
    with pytest.raises(CapacityError, match="2 blocks needed, 1 free"):
        pool.allocate("sequence:b", 2)
    assert pool.num_free == 1
    assert pool.owners() == {"sequence:a": 3}


def test_release_returns_blocks_at_zero_holders() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate("sequence:a", 2)
    pool.acquire("reader:r", blocks[:1])
    pool.release("sequence:a")
    assert (pool.num_held, pool.num_free) == (1, 1)
    pool.release("reader:r")
    assert (pool.num_held, pool.num_free) == (0, 2)
    pool.release("reader:r")
    pool.check()


def test_only_filled_and_named_blocks_stay_cached() -> None:
    pool = BlockPool(3)
    named, unnamed, _ = pool.allocate("sequence:a", 3)
    pool.mark_filled(named, b"name")
    pool.mark_filled(unnamed, None)
    pool.release("sequence:a")
    assert (pool.num_cached, pool.num_free) == (1, 2)
    assert pool.find_prefix([b"name"]) == [named]


def test_an_unfilled_block_is_never_a_hit() -> None:
    pool = BlockPool(1)
    pool.allocate("sequence:a", 1)
    assert pool.find_prefix([b"name"]) == []


def test_a_chain_is_evicted_from_its_tail() -> None:
    pool = BlockPool(3)
    for block, name in zip(pool.allocate("sequence:a", 3), (b"1", b"2", b"3"), strict=True):
        pool.mark_filled(block, name)
    pool.release("sequence:a")
    pool.allocate("sequence:b", 1)
    assert len(pool.find_prefix([b"1", b"2", b"3"])) == 2


def test_a_cached_block_that_is_hit_is_not_allocated_again() -> None:
    pool = BlockPool(2)
    block = pool.allocate("sequence:a", 1)[0]
    pool.mark_filled(block, b"1")
    pool.release("sequence:a")
    assert pool.acquire("sequence:b", [block]) == 1
    assert pool.acquire("sequence:c", [block]) == 0
    assert block not in pool.allocate("sequence:d", 1)
    with pytest.raises(CapacityError):
        pool.allocate("sequence:d", 1)


def test_two_blocks_of_one_name_are_both_given_back() -> None:
    pool = BlockPool(2)
    for owner in ("sequence:a", "sequence:b"):
        pool.mark_filled(pool.allocate(owner, 1)[0], b"same")
    pool.release("sequence:a")
    pool.release("sequence:b")
    assert (pool.num_cached, pool.num_free) == (1, 1)
    pool.check()


def test_a_free_block_cannot_be_acquired_or_filled() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="free"):
        pool.acquire("sequence:a", [0])
    with pytest.raises(ValueError, match="held by nobody"):
        pool.mark_filled(0, None)


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls leaves a ledger that adds up, and hits only what was filled under that name."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.num_owners = 0
        self.live: list[str] = []
        self.content: dict[int, bytes] = {}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        owner = f"sequence:{self.num_owners}"
        free = self.pool.num_allocatable
        try:
            taken = self.pool.allocate(owner, count)
        except CapacityError:
            assert count > free
            return
        assert len(set(taken)) == count
        for block in taken:
            self.content.pop(block, None)
        self.num_owners += 1
        self.live.append(owner)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99))
    def release(self, choice: int) -> None:
        self.pool.release(self.live.pop(choice % len(self.live)))

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 99), name=st.sampled_from([b"a", b"b", b"c", None]))
    def fill(self, choice: int, name: bytes | None) -> None:
        for block in self.pool.blocks_of(self.live[choice % len(self.live)])[:1]:
            if not self.pool.is_filled(block):
                self.pool.mark_filled(block, name)
                if name is not None:
                    self.content[block] = name

    @rule(name=st.sampled_from([b"a", b"b", b"c"]))
    def hit(self, name: bytes) -> None:
        found = self.pool.find_prefix([name])
        if found:
            assert self.content[found[0]] == name
            owner = f"reader:{self.num_owners}"
            self.num_owners += 1
            self.pool.acquire(owner, found)
            self.live.append(owner)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_held == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
