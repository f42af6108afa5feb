"""A request without a pairing has one made and waits for it, no longer than its bound and its deadline, and reserves nothing meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from decode_svc import pairing, pairing_attempt
from decode_svc.pairing_attempt import NotPairedError
from decode_svc.pool import FailurePolicy
from kvtransfer.inline import InlineReader
from rpc.errors import StatusError
from tandem.v1 import decode_pb2
from tests.support.alone import alone
from tests.support.cluster import Cluster, addresses, open_cluster, open_decode, open_prefill, until
from tests.support.running import Running

PROMPT = list(range(100, 130))
LOCAL_FALLBACK, HANDOVER = decode_pb2.PROMPT_PATH_LOCAL_FALLBACK, decode_pb2.PROMPT_PATH_HANDOVER


async def test_a_request_has_an_attempt_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "_MIN_BACKOFF_S", 60.0)
    async with open_cluster() as cluster:
        await cluster.prefills[0].kill()
        await until(lambda: not cluster.decode.load.report().kv_paths[0].transport)
        async with open_prefill("p0", port=cluster.prefills[0].server.port):
            answer = await cluster.generate(cluster.request(PROMPT))
            assert [(report.path, report.num_failed_attempts) for report in answer.prompts] == [(HANDOVER, 0)]


async def test_a_request_without_a_pairing_waits_for_one_and_reserves_nothing_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, probe = asyncio.Event(), InlineReader.probe

    async def gated(reader: InlineReader) -> Any:
        await gate.wait()
        return await probe(reader)

    monkeypatch.setattr(InlineReader, "probe", gated)
    async with open_prefill("p0") as prefill, open_decode(addresses([prefill])) as decode:
        cluster = Cluster([prefill], decode)
        running = Running(cluster, cluster.request(PROMPT))
        await until(lambda: decode.server.num_active_rpcs == 1)
        await until(lambda: len(prefill.pool.pairings) == 1)
        assert (await decode.engine.report()).num_held_blocks == 0
        gate.set()
        answer = await asyncio.wait_for(running.task, 10)
        assert answer.token_ids == alone(PROMPT)
        assert answer.prompts[0].num_failed_attempts == 0
        await cluster.assert_nothing_held()


async def test_an_attempt_that_fails_without_a_wait_is_made_once_for_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    num_attempts = 0

    async def fail(_: pairing_attempt.PairingAttempt) -> Any:
        nonlocal num_attempts
        num_attempts += 1
        if num_attempts > 20:
            await asyncio.sleep(60)  # the loop would never turn again
        raise NotPairedError("nothing can be made")

    monkeypatch.setattr(pairing_attempt.PairingAttempt, "run", fail)
    monkeypatch.setattr(pairing, "_MIN_BACKOFF_S", 60.0)
    async with open_prefill("p0") as prefill, open_decode(addresses([prefill])) as decode:
        cluster = Cluster([prefill], decode)
        await until(lambda: num_attempts == 1)
        answer = await cluster.generate(cluster.request(PROMPT))
        assert [(report.path, report.num_failed_attempts) for report in answer.prompts] == [(LOCAL_FALLBACK, 1)]
        assert num_attempts == 2
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_a_request_waits_for_a_pairing_no_longer_than_its_bound(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: InlineReader) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(InlineReader, "probe", never)
    monkeypatch.setattr(pairing, "MAX_WAIT_S", 0.2)
    async with open_prefill("p0") as prefill, open_decode(addresses([prefill])) as decode:
        cluster = Cluster([prefill], decode)
        answer = await cluster.generate(cluster.request(PROMPT, max_tokens=max_tokens))
        assert answer.token_ids == alone(PROMPT, max_tokens=max_tokens)
        assert [(report.path, report.num_failed_attempts) for report in answer.prompts] == [(LOCAL_FALLBACK, 1)]
        assert decode.pool.metrics.kv_transfer_failures("NOT_PAIRED")._value.get() == 1
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_a_deadline_that_passes_while_a_pairing_is_waited_for_is_the_callers_own(max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: InlineReader) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(InlineReader, "probe", never)
    async with open_prefill("p0") as prefill, open_decode(addresses([prefill]), policy=FailurePolicy(max_local_prefill_tokens=0)) as decode:
        cluster = Cluster([prefill], decode)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await cluster.generate(cluster.request(PROMPT, max_tokens=max_tokens), timeout_s=0.3)
        assert (StatusError.of(ended.value).code, StatusError.of(ended.value).metadata) == (grpc.StatusCode.DEADLINE_EXCEEDED, {"phase": "pairing"})
        assert decode.pool.metrics.kv_transfer_failures("NOT_PAIRED")._value.get() == 0
        await cluster.assert_nothing_held()
