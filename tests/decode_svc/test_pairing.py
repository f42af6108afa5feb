"""The pairing is made before any prompt, kept up, made anew, and a path that fails gives way to another one; every change is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from decode_svc import pairing, pairing_attempt
from decode_svc.peers import KvSettings
from decode_svc.pool import FailurePolicy
from kvtransfer import readers, sources
from kvtransfer.errors import SourceGoneError, StalledError
from kvtransfer.inline import InlineReader
from kvtransfer.memory import MemoryReader
from prefill_svc import pairings
from prefill_svc.pairings import Pairings
from rpc.errors import StatusError
from rpc.failpoints import configure_failpoints
from tandem.v1 import decode_pb2, kv_pb2, prefill_pb2
from tests.support.alone import alone
from tests.support.cluster import Cluster, addresses, open_cluster, open_decode, open_prefill, until
from tests.support.phases import gate_prefill, open_gates
from tests.support.running import Running

PROMPT = list(range(100, 130))
LOCAL_FALLBACK, HANDOVER = decode_pb2.PROMPT_PATH_LOCAL_FALLBACK, decode_pb2.PROMPT_PATH_HANDOVER


def _path(cluster: Cluster, index: int = 0) -> kv_pb2.KvPath:
    return cluster.decode.load.report().kv_paths[index]


async def _expect_handover(cluster: Cluster, prompt: list[int] = PROMPT, **params: Any) -> None:
    answer = await cluster.generate(cluster.request(prompt, **params))
    assert answer.token_ids == alone(prompt)
    assert [(report.path, report.num_failed_attempts) for report in answer.prompts] == [(HANDOVER, 0)]


def _num_changes(cluster: Cluster, instance: str = "p0") -> float:
    return float(cluster.decode.pool.metrics.kv_path_changes(instance)._value.get())


def _gauge(cluster: Cluster) -> dict[str, float]:
    """The KV path gauge's value by transport."""
    families = cluster.decode.pool.metrics._registry.collect()
    return {s.labels["transport"]: s.value for family in families for s in family.samples if s.name == "tandem_kv_path_bytes_per_second"}


async def test_the_path_is_there_before_any_prompt_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "decode_svc")
    async with open_cluster(transports=["shared_memory", "memory", "inline"]) as cluster:
        path = _path(cluster)
        assert (path.prefill_instance, path.transport) == ("p0", "memory")
        assert path.bytes_per_s > 0
        assert path.reason.startswith("shared_memory: ")
        assert "inline" not in path.reason
        assert _gauge(cluster) == {"memory": path.bytes_per_s}
        assert _num_changes(cluster) == 0
        (told,) = [record for record in caplog.records if "KV comes from p0 by memory (" in record.message]
        assert told.levelname == "INFO"
        assert cluster.prefills[0].pool.pairings


async def test_a_pairing_is_made_anew_when_prefill_starts_again_at_the_same_address(caplog: pytest.LogCaptureFixture) -> None:
    async with open_cluster() as cluster:
        await _expect_handover(cluster)
        await cluster.prefills[0].kill()
        await until(lambda: not _path(cluster).transport)
        assert _gauge(cluster) == {}
        assert _path(cluster).reason
        async with open_prefill("p0", port=cluster.prefills[0].server.port):
            await until(lambda: _path(cluster).transport == "inline")
            await _expect_handover(cluster, PROMPT[1:])
            assert _num_changes(cluster) == 2
        changes = [record.message for record in caplog.records if record.levelname == "WARNING" and "the KV path from p0" in record.message]
        assert ["from inline to none" in changes[0], "from none to inline" in changes[1]] == [True, True]
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_layouts_that_differ_are_refused_by_field_whoever_looks(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if who == "decode":
        monkeypatch.setattr(pairings, "unlike", lambda *_: {})
    async with open_cluster(decode_options={"fingerprint": "another"}) as cluster:
        assert "model_fingerprint" in _path(cluster).reason
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(cluster.request(PROMPT))
        status = StatusError.of(refused.value)
        assert status.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "model_fingerprint" in status.message
        assert "model_fingerprint" in status.metadata["p0"]
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("transport", ["memory", "inline"])
@pytest.mark.parametrize(("prefill_size", "decode_size"), [(4, 8), (8, 4), (4, 16), (2, 3)])
async def test_pools_of_other_block_sizes_hand_over_the_right_tokens(prefill_size: int, decode_size: int, transport: str) -> None:
    sizes: dict[str, Any] = {"prefill_options": {"block_size": prefill_size}, "decode_options": {"block_size": decode_size}}
    async with open_cluster(transports=[transport], **sizes) as cluster:
        for num_tokens in (1, 3, 4, 7, 8, 9, 16, 30):
            await _expect_handover(cluster, list(range(200, 200 + num_tokens)))  # each but the first one has a part in decode's cache
        assert (await cluster.decode.engine.report()).computed_prompt_tokens == 0
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_a_prefill_instance_that_offers_nothing_is_a_failed_precondition_that_says_why(max_tokens: int) -> None:
    async with open_cluster(prefill_options={"transports": []}) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster.generate(cluster.request(PROMPT, max_tokens=max_tokens))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "inline: prefill does not offer it" in str(refused.value.details())
        await cluster.assert_nothing_held()


OFFERS: dict[str, Callable[[prefill_pb2.PairResponse], object]] = {
    "no id": lambda offer: offer.ClearField("pairing_id"),
    "a short nonce": lambda offer: setattr(offer, "nonce", offer.nonce[1:]),
    "no blocks": lambda offer: offer.ClearField("num_blocks"),
    "nothing to try": lambda offer: offer.ClearField("probe_bytes"),
    "more to try than there is memory": lambda offer: setattr(offer, "probe_bytes", 2**32 - 1),
    "another probe": lambda offer: setattr(offer, "probe_digest", offer.probe_digest ^ 1),
    "a longer probe": lambda offer: setattr(offer, "probe_bytes", offer.probe_bytes + 1),
    "blocks that no memory holds": lambda offer: setattr(offer.layout, "block_size", 2**31),
}


@pytest.mark.parametrize("change", OFFERS)
async def test_an_offer_that_cannot_be_costs_an_attempt_and_no_token(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Pairings._offer

    async def changed(self: Pairings, opened: Any) -> prefill_pb2.PairResponse:
        offer = await make(self, opened)
        OFFERS[change](offer)
        return offer

    monkeypatch.setattr(Pairings, "_offer", changed)
    async with open_cluster() as cluster:
        answer = await cluster.generate(cluster.request(PROMPT))
        assert answer.token_ids == alone(PROMPT)
        assert [(report.path, report.num_failed_attempts) for report in answer.prompts] == [(LOCAL_FALLBACK, 1)]
        await until(lambda: not len(cluster.prefills[0].pool.pairings))
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("error", [RuntimeError("a library broke"), None], ids=["raises", "never ends"])
async def test_a_reader_that_cannot_be_prepared_costs_its_own_transport_only(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare(reader: MemoryReader) -> None:
        await (asyncio.Event().wait() if error is None else asyncio.sleep(0))
        assert error
        raise error

    monkeypatch.setattr(pairing_attempt, "_PREPARE_S", 0.05)
    monkeypatch.setattr(MemoryReader, "prepare", prepare, raising=False)
    async with open_cluster(transports=["memory", "inline"]) as cluster:
        assert _path(cluster).transport == "inline"
        assert ("a library broke" if error else "not ready within 0.05 s") in _path(cluster).reason
        await _expect_handover(cluster)


async def test_what_cannot_be_made_or_opened_at_all_costs_its_own_transport_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a library broke")

    monkeypatch.setattr(readers, "MemoryReader", broken)
    monkeypatch.setattr(sources, "DescriptorSockets", broken)
    async with open_cluster(transports=["shared_memory", "memory", "inline"]) as cluster:
        assert _path(cluster).transport == "inline"
        assert "memory: RuntimeError: a library broke" in _path(cluster).reason
    assert "transport shared_memory cannot be opened" in caplog.text


async def test_a_pairing_that_prefill_does_not_know_fails_the_attempt_and_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_cluster() as cluster:
        before = (await _paired(cluster)).pairing_id
        # What a prefill instance that started again behind a proxy would say.
        monkeypatch.setattr(cluster.prefills[0].pool.pairings, "_open", {})
        answer = await cluster.generate(cluster.request(PROMPT))
        assert answer.token_ids == alone(PROMPT)
        assert [(report.path, report.num_failed_attempts) for report in answer.prompts] == [(LOCAL_FALLBACK, 1)]
        monkeypatch.undo()
        assert (await _paired(cluster)).pairing_id != before
        await _expect_handover(cluster, PROMPT[1:])
        assert cluster.decode.pool.metrics.kv_transfer_failures("PAIRING_UNKNOWN")._value.get() == 1


async def _paired(cluster: Cluster) -> Any:
    (peer,) = cluster.decode.pool.peers.candidates("p0", 1)
    return await peer.pairing.paired()


@pytest.fixture
def broken_memory(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Reads by `memory` fail, and its probe does not."""

    async def fail(*_: object) -> None:
        raise StalledError("nothing comes")

    monkeypatch.setattr(MemoryReader, "read", fail)
    return monkeypatch


async def test_a_transport_that_fails_three_times_gives_way_to_another_one(broken_memory: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with open_cluster(transports=["memory", "inline"]) as cluster:
        for number in range(3):
            assert _path(cluster).transport == "memory"
            answer = await cluster.generate(cluster.request(PROMPT[number:]))
            assert answer.token_ids == alone(PROMPT[number:])
            assert answer.prompts[-1].path == LOCAL_FALLBACK
        await until(lambda: _path(cluster).transport == "inline")
        await _expect_handover(cluster, PROMPT[4:])
        assert "memory: 3 hand-overs in a row failed, the last one: nothing comes" in _path(cluster).reason
        (change,) = [record for record in caplog.records if "the KV path" in record.message]
        assert (change.levelname, "from memory to inline" in change.message, "nothing comes" in change.message) == ("WARNING", True, True)
        assert (_num_changes(cluster), list(_gauge(cluster))) == (1, ["inline"])
        await until(lambda: len(cluster.prefills[0].pool.pairings) == 1)
        await cluster.assert_nothing_held()


async def test_a_transport_that_gave_way_is_taken_again_after_its_time(broken_memory: pytest.MonkeyPatch) -> None:
    broken_memory.setattr(pairing, "BAN_S", 0.3)
    async with open_cluster(transports=["memory", "inline"]) as cluster:
        paired = await _paired(cluster)
        for _ in range(3):
            paired.transfer_failed(StalledError("nothing comes"))
        await until(lambda: _path(cluster).transport == "inline")
        await until(lambda: _path(cluster).transport == "memory")
        assert _path(cluster).reason == ""
        assert _num_changes(cluster) == 2


async def test_failures_that_are_not_in_a_row_change_nothing(broken_memory: pytest.MonkeyPatch) -> None:
    async with open_cluster(transports=["memory", "inline"]) as cluster:
        for number in range(2):
            await cluster.generate(cluster.request(PROMPT[number:]))
        broken_memory.undo()
        await _expect_handover(cluster, PROMPT[3:])
        paired = await _paired(cluster)
        paired.transfer_failed(StalledError("nothing comes"))
        paired.transfer_failed(StalledError("nothing comes"))
        assert not paired.failing.done()


async def test_the_only_transport_is_kept_though_it_fails(broken_memory: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async with open_cluster(transports=["memory"]) as cluster:
        paired = await _paired(cluster)
        for _ in range(3):
            paired.transfer_failed(StalledError("nothing comes"))
        await until(lambda: any("stays on memory" in record.message for record in caplog.records))
        assert await _paired(cluster) is paired
        broken_memory.undo()
        await _expect_handover(cluster)


async def test_an_instance_that_goes_away_while_it_fails_takes_no_transport_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_cluster(transports=["memory", "inline"]) as cluster:
        paired = await _paired(cluster)
        for _ in range(3):
            paired.transfer_failed(SourceGoneError("gone"))
        await cluster.prefills[0].kill()
        await until(lambda: not _path(cluster).transport)
        async with open_prefill("p0", port=cluster.prefills[0].server.port):
            await until(lambda: bool(_path(cluster).transport))
            assert _path(cluster).transport == "memory"


async def test_a_pairing_that_another_one_replaced_stays_for_those_who_use_it() -> None:
    async with open_cluster(transports=["memory", "inline"]) as cluster:
        gate_prefill(cluster)
        running = Running(cluster, cluster.request(PROMPT))
        await until(lambda: cluster.prefills[0].device.entered.is_set())
        paired = await _paired(cluster)
        for _ in range(3):
            paired.transfer_failed(StalledError("nothing comes"))
        await until(lambda: _path(cluster).transport == "inline")
        assert len(cluster.prefills[0].pool.pairings) == 2
        open_gates(cluster)
        answer = await asyncio.wait_for(running.task, 10)
        assert answer.token_ids == alone(PROMPT)
        assert (answer.handover.transport, answer.prompts[0].num_failed_attempts) == ("memory", 0)
        await until(lambda: len(cluster.prefills[0].pool.pairings) == 1)
        await _expect_handover(cluster, PROMPT[1:])


async def test_a_slow_instance_slows_only_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the slow one takes its own share of the bytes in flight, and never more."""
    gate, read = asyncio.Event(), InlineReader.read
    block_bytes = 128
    kv = KvSettings(transports=("inline",), min_bytes_per_s=1, max_bytes_in_flight=block_bytes, max_total_bytes_in_flight=2 * block_bytes)
    async with open_cluster(num_prefills=2, kv=kv) as cluster:
        slow = (await _paired(cluster)).path._reader

        async def gated(reader: InlineReader, *arguments: Any) -> None:
            if reader is slow:
                await gate.wait()
            await read(reader, *arguments)

        monkeypatch.setattr(InlineReader, "read", gated)
        waiting = [Running(cluster, cluster.request(PROMPT[number:])) for number in range(3)]
        await until(lambda: len(cluster.prefills[0].pool.holds) == 3)
        for number in range(3):
            await _expect_handover(cluster, PROMPT[number + 3 :], prefill="p1")
        assert not any(running.task.done() for running in waiting)
        gate.set()
        for number, running in enumerate(waiting):
            assert (await asyncio.wait_for(running.task, 10)).token_ids == alone(PROMPT[number:])
        await cluster.assert_nothing_held()


async def test_hidden_time_is_what_passed_before_the_prompt_was_computed() -> None:
    async with open_cluster() as cluster:
        try:
            configure_failpoints("prefill=delay:0.3")  # behind the last chunk, in front of PrefillDone
            hidden = (await cluster.generate(cluster.request(PROMPT))).handover
            configure_failpoints("kv_transfer=delay:0.1")
            exposed = (await cluster.generate(cluster.request([1, *PROMPT]))).handover
        finally:
            configure_failpoints("")
        assert 0 < hidden.hidden_s == pytest.approx(hidden.transfer_s)
        assert 0 <= exposed.hidden_s < exposed.transfer_s


async def test_a_load_report_tells_of_a_path_that_has_gone() -> None:
    async with open_cluster() as cluster:
        call = cluster.decode.stub.WatchLoad(decode_pb2.DecodeServiceWatchLoadRequest())
        assert (await call.read()).load.kv_paths[0].transport == "inline"
        await cluster.prefills[0].kill()
        async with asyncio.timeout(5):
            while (await call.read()).load.kv_paths[0].transport:
                pass
        call.cancel()


async def test_what_another_instance_lacks_comes_last_among_retries() -> None:
    async with open_cluster(num_prefills=3, policy=FailurePolicy(max_prefill_attempts=2)) as cluster:
        await cluster.prefills[1].kill()
        await until(lambda: not _path(cluster, 1).transport)
        for _ in range(4):
            assert [peer.name for peer in cluster.decode.pool.peers.candidates("p0", 2)] == ["p0", "p2"]


async def test_a_decode_worker_that_ends_leaves_no_pairing() -> None:
    async with open_prefill("p0") as prefill:
        async with open_decode(addresses([prefill])):
            await until(lambda: len(prefill.pool.pairings) == 1)
        await until(lambda: not len(prefill.pool.pairings))
