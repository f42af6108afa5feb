"""A hold lends announced blocks to its own pairing's readers, and gives them back once, behind the last one."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from kvtransfer.errors import HandoverProtocolError, HoldUnknownError, SourceGoneError
from kvtransfer.hold import Holds
from kvtransfer.quarantine import Quarantine


class _References:
    """Remembers what was given back."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    async def acquire(self, reader_id: str, seq_id: str, first_block: int, num_blocks: int) -> tuple[int, ...]:
        raise AssertionError("a hold's references came with the allocation")

    def drop(self, reader_id: str) -> None:
        self.dropped.append(reader_id)


@pytest.fixture
async def references() -> _References:
    return _References()


@pytest.fixture
async def holds(references: _References) -> Holds:
    return Holds(references, Quarantine())


def _nothing() -> None:
    """Not told to stop."""


async def test_a_hold_is_found_under_its_pairing_and_the_refusal_does_not_tell_whether_it_is_there(holds: Holds) -> None:
    hold = holds.open("r", "mine", 0, 3)
    assert holds.find(hold.hold_id, "mine") is hold
    with pytest.raises(HoldUnknownError) as foreign:
        holds.find(hold.hold_id, "theirs")
    with pytest.raises(HoldUnknownError) as unnamed:
        holds.find(hold.hold_id, "")
    with pytest.raises(HoldUnknownError) as unknown:
        holds.find("0" * 32, "mine")
    assert str(foreign.value) == str(unnamed.value) == str(unknown.value)
    holds.close(hold)
    with pytest.raises(HoldUnknownError):
        holds.find(hold.hold_id, "mine")


async def test_a_hold_that_begins_behind_cached_blocks_lends_those_announced_only(holds: Holds) -> None:
    hold = holds.open("r", "p", 2, 3)
    hold.allocated((9, 8, 7, 6, 5))
    assert hold.announce(2) == (2, 0)
    assert hold.announce(4) == (2, 2)
    for first, count in ((1, 1), (1, 2), (2, 3), (4, 1), (2, 0), (2, -1), (5, 1)):
        with pytest.raises(HandoverProtocolError), hold.reading(first, count, _nothing):
            raise AssertionError("nothing was lent")
    with hold.reading(2, 2, _nothing) as ids:
        assert ids == (7, 6)
    assert hold.num_unread_blocks == 0
    assert hold.announce(99) == (4, 1)
    assert hold.num_unread_blocks == 1


async def test_a_reader_that_fails_has_read_nothing(holds: Holds) -> None:
    hold = holds.open("r", "p", 0, 2)
    hold.allocated((1, 2))
    hold.announce(2)
    with pytest.raises(ZeroDivisionError), hold.reading(0, 2, _nothing):
        raise ZeroDivisionError
    assert hold.num_unread_blocks == 2


async def test_the_references_go_once_behind_the_last_reader(holds: Holds, references: _References) -> None:
    hold = holds.open("r", "p", 0, 2)
    hold.allocated((1, 2))
    hold.announce(2)
    stopped: list[int] = []
    with ExitStack() as one:
        one.enter_context(hold.reading(0, 1, lambda: stopped.append(1)))
        with hold.reading(1, 1, lambda: stopped.append(2)):
            holds.close(hold)
            holds.close(hold)
            assert stopped == [1, 2]
            with pytest.raises(SourceGoneError), hold.reading(0, 1, _nothing):
                raise AssertionError("nothing was lent")
        assert references.dropped == []
    assert references.dropped == ["r"]
    assert len(holds) == 0
    await asyncio.sleep(0)


async def test_a_hold_without_readers_gives_back_at_once(holds: Holds, references: _References) -> None:
    holds.close(holds.open("r", "p", 0, 2))
    assert references.dropped == ["r"]
