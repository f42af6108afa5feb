"""Every row of the table of bad input between services, at real servers over fake engines: refused as the row says, and nothing is held afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from checks.bad_peers import BAD_PEERS, open_pairing
from checks.refusals import DECODE_GENERATE, BadInput, Facts, raw_channel, send
from engine.proto import kv_layout_to_proto
from tests.support.cluster import Cluster, open_cluster
from tests.support.fake_device import VOCAB_SIZE

in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with open_cluster() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(cluster: Cluster) -> AsyncIterator[dict[bool, Any]]:
    """Channels by whether they lead to decode."""
    servers = {True: cluster.decode.server, False: cluster.prefills[0].server}
    async with raw_channel(f"127.0.0.1:{servers[True].port}") as to_decode, raw_channel(f"127.0.0.1:{servers[False].port}") as to_prefill:
        yield {True: to_decode, False: to_prefill}


@in_module_loop
@pytest.mark.parametrize("row", BAD_PEERS, ids=lambda row: row.name)
async def test_a_peers_mistake_is_refused_as_the_table_says(row: BadInput, cluster: Cluster, doors: dict[bool, Any]) -> None:
    model = cluster.decode.engine.model
    facts = Facts("fake", VOCAB_SIZE, model.max_model_len, layout=kv_layout_to_proto(model.layout))
    async with open_pairing(cluster.prefills[0].stub, facts) as pairing_id:
        refusal = await send(doors[row.path == DECODE_GENERATE], row, row.make(replace(facts, pairing_id=pairing_id)))
    assert refusal.difference(row) == ""
    await cluster.assert_nothing_held()
    answer = await cluster.generate(cluster.request([1, 2, 3], max_tokens=2))
    assert len(answer.token_ids) == 2


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in BAD_PEERS}) == len(BAD_PEERS)
