"""Workers between which KV goes by `nixl`: over TCP, as processes of two hosts would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from decode_svc.peers import KvSettings
from kvtransfer.nixl_reader import NixlReader
from kvtransfer.nixl_settings import NixlSettings
from kvtransfer.nixl_source import NixlSource
from tandem.v1 import decode_pb2
from tests.kvtransfer.ends_nixl import MISSING
from tests.support.alone import alone
from tests.support.cluster import Cluster, open_cluster, until

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
PROMPT = list(range(100, 130))


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp")
    kv = KvSettings(transports=("nixl", "inline"), checksum=True, min_bytes_per_s=1, nixl=NixlSettings("lo"))
    async with open_cluster(kv=kv) as opened:
        await until(lambda: opened.decode.load.report().kv_paths[0].transport != "", 15)
        yield opened
    await until(lambda: not any(thread.name == "nixl" for thread in threading.enumerate()), 10)


def _reader(cluster: Cluster) -> NixlReader:
    (peer,) = cluster.decode.pool.peers._peers.values()
    paired = peer.pairing._paired
    assert paired is not None
    reader = paired._reader
    assert isinstance(reader, NixlReader)
    return reader


def _source(cluster: Cluster) -> NixlSource:
    source = cluster.prefills[0].pool.sources.by_name["nixl"]
    assert isinstance(source, NixlSource)
    return source


async def _expect_nixl(cluster: Cluster, prompt: list[int]) -> None:
    answer = await cluster.generate(cluster.request(prompt))
    assert answer.token_ids == alone(prompt)
    assert (answer.prompts[-1].path, answer.handover.transport) == (decode_pb2.PROMPT_PATH_HANDOVER, "nixl")


async def test_prompts_are_handed_over_by_nixl_and_equal_one_engine(cluster: Cluster) -> None:
    (path,) = cluster.decode.load.report().kv_paths
    assert path.transport == "nixl"
    assert _reader(cluster).direction == "write"
    for length in (1, 4, 9, 30):
        await _expect_nixl(cluster, list(range(200, 200 + length)))
    prompts = [list(range(300 + 40 * number, 330 + 40 * number)) for number in range(4)]
    await asyncio.gather(*(_expect_nixl(cluster, prompt) for prompt in prompts))
    await cluster.assert_nothing_held()
    assert _source(cluster).num_agents == 1


async def test_cancelled_requests_cost_no_region(cluster: Cluster) -> None:
    for number in range(10):
        generating = asyncio.create_task(cluster.generate(cluster.request(PROMPT[: 10 + number])))
        await asyncio.sleep(0.003 * number)
        generating.cancel()
        await asyncio.wait({generating})
    await cluster.assert_nothing_held()
    assert not _reader(cluster).lost
    await _expect_nixl(cluster, PROMPT)


async def test_a_lost_region_costs_one_hand_over_and_the_pairing_is_made_anew(cluster: Cluster) -> None:
    first = _reader(cluster)
    assert first._staging is not None
    first._staging.burn("for a test")
    answer = await cluster.generate(cluster.request(PROMPT))
    assert answer.token_ids == alone(PROMPT)
    await until(lambda: cluster.decode.load.report().kv_paths[0].transport == "nixl", 15)
    assert _reader(cluster) is not first
    await _expect_nixl(cluster, PROMPT[5:])
    await until(lambda: _source(cluster).num_agents == 1)
    await cluster.assert_nothing_held()


async def test_prefills_agent_that_is_lost_costs_the_same(cluster: Cluster) -> None:
    (end,) = _source(cluster)._ends.values()
    end.agent.close("for a test")
    answer = await cluster.generate(cluster.request(PROMPT))
    assert answer.token_ids == alone(PROMPT)
    await until(lambda: [one is end for one in _source(cluster)._ends.values()] == [False], 15)
    await until(lambda: cluster.decode.load.report().kv_paths[0].transport == "nixl", 15)
    await _expect_nixl(cluster, PROMPT[5:])
    await cluster.assert_nothing_held()
