from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gateway.ledger import Ledger, num_charged_blocks


@given(prompt=st.integers(1, 300), output=st.integers(0, 300), size=st.sampled_from([1, 4, 16]), n=st.integers(1, 4), data=st.data())
def test_the_charge_is_what_an_allocator_would_take(prompt: int, output: int, size: int, n: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, prompt // size))
    revived = data.draw(st.integers(0, hits))
    shared_full = prompt // size
    # Full prompt blocks are shared by all samples; each sample has its own copy of a partly filled one, and its own output.
    own = [-(-(prompt + output) // size) - shared_full for _ in range(n)]
    if output == 0 and prompt % size == 0:
        assert sum(own) == 0
    assert num_charged_blocks(prompt, output, size, n=n, num_hits=hits, num_revived=revived) == shared_full - hits + sum(own) + revived


def test_decodes_figure_replaces_the_forecast() -> None:
    ledger = Ledger()
    ledger.report("d", num_blocks=10, num_free=10)
    ledger.open("a", "d", "t", 8)
    assert (ledger.room("d"), ledger.num_used_by("t")) == (2, 8)
    ledger.correct("a", 3)
    assert (ledger.room("d"), ledger.num_used("d"), ledger.num_used_by("t")) == (7, 3, 3)
    ledger.close("a")
    ledger.close("a")
    ledger.correct("a", 9)
    assert (ledger.room("d"), ledger.num_used_by("t")) == (10, 0)
    ledger.assert_nothing_held()


def test_an_answer_without_a_figure_leaves_the_forecast_and_the_report_counts_it() -> None:
    ledger = Ledger()
    ledger.report("d", num_blocks=10, num_free=10)
    ledger.open("a", "d", "t", 4)
    ledger.answered("a")
    ledger.answered("b")
    ledger.report("d", num_blocks=10, num_free=6)
    assert (ledger.room("d"), ledger.num_used("d")) == (6, 4)


def test_more_than_there_is_room_for_is_not_promised() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="room for 0"):
        ledger.open("a", "d", "t", 1)
    ledger.report("d", num_blocks=10, num_free=10)
    ledger.open("a", "d", "t", 8)
    with pytest.raises(ValueError, match="room for 2"):
        ledger.open("b", "d", "t", 3)
    with pytest.raises(ValueError, match="open already"):
        ledger.open("a", "d", "t", 1)


def test_what_others_hold_is_known_by_the_instances_own_word() -> None:
    ledger = Ledger()
    ledger.report("d", num_blocks=10, num_free=4)
    assert ledger.room("d") == 4
    ledger.open("a", "d", "t", 3)
    assert ledger.room("d") == 1
    ledger.correct("a", 3)
    ledger.report("d", num_blocks=10, num_free=1)
    assert ledger.room("d") == 1
    ledger.close("a")
    assert ledger.room("d") == 4, "the release counts before the next report"
    ledger.report("d", num_blocks=10, num_free=4)
    assert ledger.room("d") == 4


def test_an_instance_that_refused_has_no_room_until_it_is_heard_of() -> None:
    ways: list[Callable[[Ledger], None]] = [lambda it: it.report("d", num_blocks=10, num_free=10), lambda it: it.close("a"), lambda it: it.retry("d")]
    for heard in ways:
        ledger = Ledger()
        ledger.report("d", num_blocks=10, num_free=10)
        ledger.open("a", "d", "t", 2)
        ledger.correct("a", 2)
        ledger.refuse("d")
        assert ledger.room("d") == 0
        heard(ledger)
        assert ledger.room("d") > 0


class Promises(RuleBasedStateMachine):
    """A ledger beside a pool that allocates for real; the pool hits its prefix cache now and then, so it takes less than forecast."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.sizes = {"d0": 20, "d1": 7}
        self.real: dict[str, tuple[str, int]] = {}
        self.num_opened = 0
        for name in self.sizes:
            self.report(name)

    def free(self, name: str) -> int:
        return self.sizes[name] - sum(blocks for instance, blocks in self.real.values() if instance == name)

    @rule(name=st.sampled_from(["d0", "d1"]))
    def report(self, name: str) -> None:
        self.ledger.report(name, num_blocks=self.sizes[name], num_free=self.free(name))

    @rule(target=keys, name=st.sampled_from(["d0", "d1"]), blocks=st.integers(0, 9), tenant=st.sampled_from("ab"))
    def open(self, name: str, blocks: int, tenant: str) -> object:
        if blocks > self.ledger.room(name):
            return multiple()
        self.num_opened += 1
        self.ledger.open(f"k{self.num_opened}", name, tenant, blocks)
        return (f"k{self.num_opened}", name, blocks)

    @rule(key=keys, hits=st.integers(0, 9))
    def reserve(self, key: tuple[str, str, int], hits: int) -> None:
        name, instance, blocks = key
        if name not in self.real:
            taken = max(0, blocks - hits)
            assert taken <= self.free(instance), "what was promised is there"
            self.real[name] = (instance, taken)
            self.ledger.correct(name, taken)

    @rule(key=consumes(keys))
    def close(self, key: tuple[str, str, int]) -> None:
        self.real.pop(key[0], None)
        self.ledger.close(key[0])
        self.ledger.close(key[0])

    @invariant()
    def never_over_committed(self) -> None:
        for name, size in self.sizes.items():
            assert 0 <= self.ledger.num_used(name) <= size
            assert self.ledger.room(name) <= size - self.ledger.num_used(name)
        assert self.ledger.num_used_by("a") + self.ledger.num_used_by("b") == self.ledger.num_used("d0") + self.ledger.num_used("d1")


TestPromises = Promises.TestCase
TestPromises.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
