"""The contract, over every transport that ships."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kvtransfer.contract import TransportContract
from tests.kvtransfer.ends import Ends, open_ends


@pytest.fixture(params=["memory", "inline"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[Ends]:
    async with open_ends(request.param) as opened:
        yield opened


class TestTransports(TransportContract):
    pass
