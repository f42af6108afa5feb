"""A transport that failed is put behind the others for a time: never for ever, and never where there is no other one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from decode_svc import pairing
from decode_svc.paired import Paired
from kvtransfer.errors import NoTransportError, StalledError
from kvtransfer.memory import MemoryReader
from tandem.v1 import decode_pb2
from tests.support.alone import alone
from tests.support.cluster import Cluster, open_cluster, open_prefill, until

PROMPT = list(range(100, 130))
TRANSPORTS = ["memory", "inline"]


def _transport(cluster: Cluster) -> str:
    return cluster.decode.load.report().kv_paths[0].transport


async def _paired(cluster: Cluster) -> Paired:
    (peer,) = cluster.decode.pool.peers.candidates("p0", 1)
    return await peer.pairing.paired()


async def _fail(cluster: Cluster) -> None:
    paired = await _paired(cluster)
    for _ in range(3):
        paired.transfer_failed(StalledError("nothing comes"))
    await until(lambda: _transport(cluster) == "inline")


async def test_a_transport_that_failed_is_taken_when_the_instance_comes_back_with_no_other_one() -> None:
    async with open_cluster(transports=TRANSPORTS) as cluster:
        await _fail(cluster)
        await cluster.prefills[0].kill()
        await until(lambda: not _transport(cluster))
        async with open_prefill("p0", port=cluster.prefills[0].server.port, transports=["memory"]):
            answer = await cluster.generate(cluster.request(PROMPT))
            assert answer.token_ids == alone(PROMPT)
            assert [(report.path, report.num_failed_attempts) for report in answer.prompts] == [(decode_pb2.PROMPT_PATH_HANDOVER, 0)]
            assert answer.handover.transport == "memory"


async def test_a_transport_whose_time_is_over_is_tried_until_it_can_be_had(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pairing, "BAN_S", 0.05)
    num_tries, attach, third = 0, MemoryReader.attach, asyncio.Event()

    async def try_again(reader: MemoryReader, *arguments: Any) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries < 3:
            raise NoTransportError("not yet")
        await third.wait()
        await attach(reader, *arguments)

    async with open_cluster(transports=TRANSPORTS) as cluster:
        monkeypatch.setattr(MemoryReader, "attach", try_again)
        await _fail(cluster)
        kept = await _paired(cluster)
        await until(lambda: num_tries == 3)
        assert await _paired(cluster) is kept
        third.set()
        await until(lambda: _transport(cluster) == "memory")
        assert sum("the KV path from p0 has changed" in record.message for record in caplog.records) == 2
        await until(lambda: len(cluster.prefills[0].pool.pairings) == 1)
        await cluster.assert_nothing_held()
