"""The ledger of blocks."""

from __future__ import annotations

from array import array

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


def test_transferred_references_are_the_new_owners_and_nothing_is_given_back_meanwhile() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate("sequence:a", 2)
    pool.acquire("sequence:b", blocks[:1])
    pool.mark_filled(blocks[0], b"1")
    pool.transfer("sequence:a", "step:1")
    pool.transfer("sequence:b", "step:1")
    pool.transfer("nobody", "step:1")
    assert pool.owners() == {"step:1": 3}
    assert pool.find_prefix([b"1"]) == blocks[:1]
    with pytest.raises(CapacityError, match="3 blocks needed, 2 free"):
        pool.allocate("sequence:c", 3)
    pool.release("sequence:a")
    assert pool.num_held == 2
    pool.release("step:1")
    assert (pool.num_held, pool.num_cached, pool.num_free) == (0, 1, 3)
    pool.check()


def test_a_generation_is_odd_while_the_block_is_held_and_another_one_in_each_hold() -> None:
    generations = array("I", [0, 2**32 - 2])
    pool = BlockPool(2, memoryview(generations))
    pool.allocate("sequence:a", 2)
    assert list(generations) == [1, 2**32 - 1]
    pool.acquire("reader:r", [0, 1])
    pool.transfer("sequence:a", "step:1")
    pool.mark_filled(0, b"name")
    pool.release("step:1")
    assert list(generations) == [1, 2**32 - 1]
    pool.release("reader:r")
    assert list(generations) == [2, 0]
    pool.acquire("reader:s", [0])  # the very same content, and yet not the hold that a reader was told of
    assert list(generations) == [3, 0]
    pool.release("reader:s")
    pool.check()


def test_a_generation_that_does_not_say_whether_its_block_is_held_is_a_broken_ledger() -> None:
    generations = array("I", [0, 0])
    pool = BlockPool(2, memoryview(generations))
    pool.allocate("sequence:a", 1)
    for block in (0, 1):
        generations[block] += 1
        with pytest.raises(AssertionError, match="odd exactly while"):
            pool.check()
        generations[block] -= 1
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls leaves what a model of three dictionaries says, and hits only what was filled under that name."""

    def __init__(self) -> None:
        super().__init__()
        self.generations = array("I", [0, 0, 0, 2**32 - 2, 2**32 - 4, 6])
        self.before = list(self.generations)
        self.pool = BlockPool(6, memoryview(self.generations))
        self.held_before: set[int] = set()
        self.num_owners = 0
        self.owners: dict[str, list[int]] = {}
        self.filled: set[int] = set()
        self.content: dict[int, bytes] = {}
        """Names under which blocks may be hit, as long as they are."""

    def new_owner(self, kind: str, blocks: list[int]) -> None:
        self.num_owners += 1
        if blocks:
            self.owners[f"{kind}:{self.num_owners}"] = blocks

    def next_owner(self, kind: str) -> str:
        return f"{kind}:{self.num_owners + 1}"

    def choose(self, choice: int) -> str:
        return list(self.owners)[choice % len(self.owners)]

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        free = self.pool.num_allocatable
        try:
            taken = self.pool.allocate(self.next_owner("sequence"), count)
        except CapacityError:
            assert count > free
            return
        assert len(set(taken)) == count <= free
        assert not set(taken) & {block for blocks in self.owners.values() for block in blocks}
        self.filled -= set(taken)
        for block in taken:
            self.content.pop(block, None)
        self.new_owner("sequence", taken)

    @precondition(lambda self: self.owners)
    @rule(choice=st.integers(0, 99))
    def grow(self, choice: int) -> None:
        owner = self.choose(choice)
        if self.pool.num_allocatable:
            taken = self.pool.allocate(owner, 1)
            self.filled -= set(taken)
            self.content.pop(taken[0], None)
            self.owners[owner] = [*self.owners[owner], *taken]

    @precondition(lambda self: self.owners)
    @rule(choice=st.integers(0, 99), count=st.integers(1, 3))
    def acquire(self, choice: int, count: int) -> None:
        blocks = self.owners[self.choose(choice)][:count]
        assert self.pool.acquire(self.next_owner("reader"), blocks) == 0
        self.new_owner("reader", blocks)

    @precondition(lambda self: self.owners)
    @rule(choice=st.integers(0, 99))
    def release(self, choice: int) -> None:
        owner = self.choose(choice)
        self.pool.release(owner)
        self.pool.release(owner)
        del self.owners[owner]

    @precondition(lambda self: self.owners)
    @rule(choice=st.integers(0, 99), onto=st.integers(0, 99), new=st.booleans())
    def transfer(self, choice: int, onto: int, new: bool) -> None:
        owner = self.choose(choice)
        to = self.next_owner("step") if new else self.choose(onto)
        free = self.pool.num_allocatable
        self.pool.transfer(owner, to)
        assert self.pool.num_allocatable == free
        blocks = self.owners.pop(owner)
        self.owners[to] = [*self.owners.get(to, []), *blocks]
        self.num_owners += 1

    @precondition(lambda self: self.owners)
    @rule(choice=st.integers(0, 99), name=st.sampled_from([b"a", b"b", b"c", None]))
    def fill(self, choice: int, name: bytes | None) -> None:
        block = self.owners[self.choose(choice)][0]
        if block not in self.filled:
            self.pool.mark_filled(block, name)
            self.filled.add(block)
            if name is not None:
                self.content[block] = name

    @precondition(lambda self: self.owners)
    @rule(choice=st.integers(0, 99))
    def unname(self, choice: int) -> None:
        blocks = self.owners[self.choose(choice)]
        self.pool.unname(blocks)
        for block in blocks:
            self.content.pop(block, None)

    @rule(names=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3))
    def hit(self, names: list[bytes]) -> None:
        found = self.pool.find_prefix(names)
        assert [self.content[block] for block in found] == names[: len(found)]
        assert set(found) <= self.filled
        held = {block for blocks in self.owners.values() for block in blocks}
        assert self.pool.num_held_among(found) == sum(block in held for block in found)
        assert self.pool.acquire(self.next_owner("reader"), found) == len(set(found) - held)
        self.new_owner("reader", found)

    @invariant()
    def the_pool_says_what_the_model_says(self) -> None:
        self.pool.check()
        assert self.pool.owners() == {owner: len(blocks) for owner, blocks in self.owners.items()}
        assert all(self.pool.blocks_of(owner) == tuple(blocks) for owner, blocks in self.owners.items())
        held = {block for blocks in self.owners.values() for block in blocks}
        assert self.pool.num_held == len(held)
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_held == self.pool.num_blocks
        assert all(self.pool.is_filled(block) == (block in self.filled) for block in held)

    @invariant()
    def a_generation_grows_by_one_when_a_hold_of_its_block_begins_or_ends_and_never_else(self) -> None:
        held = {block for blocks in self.owners.values() for block in blocks}
        for block, (before, now) in enumerate(zip(self.before, self.generations, strict=True)):
            assert now % 2 == (block in held)
            assert (now - before) % 2**32 == ((block in held) != (block in self.held_before))
        self.before, self.held_before = list(self.generations), held

    def teardown(self) -> None:
        for owner in self.owners:
            self.pool.release(owner)
        self.pool.check()
        assert self.pool.num_allocatable == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
