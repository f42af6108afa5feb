"""What a peer says of itself is repeated in statuses, logs and reports, but never more of it than they can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from prefill_svc.pairings import Pairings
from rpc.errors import StatusError
from tandem.v1 import prefill_pb2
from tests.support.alone import alone
from tests.support.cluster import Cluster, open_cluster

PROMPT = list(range(100, 130))
LONG = "a" * 100_000


def _offer(change: Callable[[prefill_pb2.PairResponse], object], monkeypatch: pytest.MonkeyPatch) -> None:
    make = Pairings._offer

    async def changed(self: Pairings, opened: Any) -> prefill_pb2.PairResponse:
        offer = await make(self, opened)
        change(offer)
        return offer

    monkeypatch.setattr(Pairings, "_offer", changed)


def _reason(cluster: Cluster) -> str:
    return cluster.decode.load.report().kv_paths[0].reason


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_a_layout_with_a_long_name_is_refused_by_field(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(lambda offer: setattr(offer.layout, "model_fingerprint", LONG), monkeypatch)
    async with open_cluster() as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(cluster.request(PROMPT, max_tokens=max_tokens))
        status = StatusError.of(refused.value)
        assert (status.code, status.reason, list(status.metadata)) == (grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH", ["p0"])
        assert len(_reason(cluster)) < 1000


async def test_a_long_refusal_of_one_transport_is_told_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(offer: prefill_pb2.PairResponse) -> None:
        del offer.sources[:1]
        offer.refusals["memory"] = LONG

    _offer(refuse, monkeypatch)
    async with open_cluster(transports=["memory", "inline"]) as cluster:
        assert (await cluster.generate(cluster.request(PROMPT))).token_ids == alone(PROMPT)
        assert _reason(cluster).startswith("memory: aaa")
        assert len(_reason(cluster)) < 1000
