from __future__ import annotations

from typing import Any

import grpc
import pytest

from rpc.deadline import HOP_MARGIN_S, next_hop_s, remaining_s
from rpc.errors import StatusError
from tests.rpc.peers import serving


async def _remaining(timeout_s: float | None, default_s: float) -> float:
    seen: list[float] = []

    async def look(request: bytes, context: Any) -> bytes:
        seen.append(remaining_s(context, default_s))
        return request

    async with serving(UnaryUnary=look) as pair:
        await pair.call("UnaryUnary", b"", timeout=timeout_s)
    return seen[0]


async def test_clients_deadline_is_what_remains() -> None:
    # gRPC writes a timeout with few digits and rounds it up, by at most a hundredth.
    assert 3 < await _remaining(5, 600) <= 5.05


async def test_without_or_with_a_longer_deadline_the_default_remains() -> None:
    assert await _remaining(None, 60) == 60
    assert await _remaining(500, 60) == 60


def test_each_hop_gets_twenty_milliseconds_less() -> None:
    assert next_hop_s(next_hop_s(1.0)) == pytest.approx(0.96)
    assert HOP_MARGIN_S == 0.020


def test_nothing_left_for_the_next_hop_names_the_phase() -> None:
    with pytest.raises(StatusError) as caught:
        next_hop_s(0.02, "reserve")

    assert (caught.value.code, caught.value.metadata) == (grpc.StatusCode.DEADLINE_EXCEEDED, {"phase": "reserve"})
