"""The contract, over every transport that has a file `ends_*.py` here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from tests.kvtransfer.contract import HeldReadContract, OneSidedContract, TransportContract
from tests.kvtransfer.ends import Ends, open_ends
from tests.kvtransfer.kinds import Kind, kinds


@pytest.fixture
async def ends(name: str) -> AsyncIterator[Ends]:
    async with open_ends(name) as opened:
        yield opened


def _over(which: Callable[[Kind], bool]) -> pytest.MarkDecorator:
    """Each test once for each of these kinds; one that cannot run here says why."""
    tested = [kind for kind in kinds().values() if which(kind)]
    return pytest.mark.parametrize("name", [pytest.param(kind.name, marks=pytest.mark.skip(reason=kind.missing) if kind.missing else ()) for kind in tested])


@_over(lambda kind: True)
class TestEveryTransport(TransportContract):
    pass


@_over(lambda kind: not kind.one_sided)
class TestUnderPrefillsHold(HeldReadContract):
    pass


@_over(lambda kind: kind.one_sided)
class TestOneSided(OneSidedContract):
    pass


@_over(lambda kind: True)
async def test_a_kind_and_its_source_agree_on_who_reads(name: str) -> None:
    async with open_ends(name) as ends:
        assert ends.opened.source.one_sided == kinds()[name].one_sided
        assert ends.opened.source.name == ends.reader.name


def test_the_transports_that_need_nothing_are_always_among_them() -> None:
    assert {"memory", "inline"} <= {kind.name for kind in kinds().values() if not kind.missing}
