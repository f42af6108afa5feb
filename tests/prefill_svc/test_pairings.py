"""The Pair RPC: what it refuses, what it offers, and what ends with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import xxhash

from engine.proto import kv_layout_to_proto, sampling_params_to_proto
from engine.sampling_params import SamplingParams
from kvtransfer.pairing import sources_by_name
from prefill_svc import pairings
from prefill_svc.conversation import Conversation
from rpc.errors import StatusError
from tandem.v1 import prefill_pb2
from tests.support.cluster import PrefillNode, open_prefill, until
from tests.support.held import assert_nothing_held
from tests.support.pair_call import pair_start, paired

PROMPT = list(range(100, 130))


@pytest.fixture
async def node() -> AsyncIterator[PrefillNode]:
    async with open_prefill("p0") as opened:
        yield opened
        if opened.device.gate is not None:
            opened.device.gate.set()
        await until(lambda: len(opened.pool.pairings) == 0)
        await assert_nothing_held(opened.engine)
        assert len(opened.pool.holds) == 0


async def _refused(call: Any) -> StatusError:
    """Reads to the end, which must be an error."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return StatusError.of(error)
    raise AssertionError("the RPC ended OK")


async def _pair_refused(node: PrefillNode, request: prefill_pb2.PairRequest) -> StatusError:
    call = node.stub.Pair(timeout=20)
    await call.write(request)
    return await asyncio.wait_for(_refused(call), 5)


async def _prefill(node: PrefillNode, pairing_id: str, transport: str = "inline") -> Any:
    call = node.stub.Prefill(timeout=20)
    params = sampling_params_to_proto(SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    start = prefill_pb2.PrefillStart(request_id="r", pairing_id=pairing_id, prompt_token_ids=PROMPT, sampling_params=params, transport=transport)
    await call.write(prefill_pb2.PrefillRequest(start=start))
    return call


async def _held(node: PrefillNode, pairing_id: str) -> tuple[Any, str]:
    call = await _prefill(node, pairing_id)
    while not (response := await call.read()).HasField("done"):
        pass
    return call, response.done.hold_id


async def test_a_pairing_tells_the_pool_and_how_to_try_it(node: PrefillNode) -> None:
    async with paired(node, transports=["memory", "inline", "carrier_pigeon"]) as offer:
        assert offer.layout == kv_layout_to_proto(node.engine.model.layout)
        assert (offer.num_blocks, offer.probe_bytes) == (node.engine.kv_cache.num_blocks, 4096)
        assert offer.probe_digest == xxhash.xxh3_64_intdigest(node.engine.kv_cache.probe.data)
        assert list(sources_by_name(offer)) == ["memory", "inline"]
        assert list(offer.refusals) == ["carrier_pigeon"]


async def test_transports_of_one_host_or_process_are_refused_to_others_with_the_reason(node: PrefillNode) -> None:
    async with paired(node, process_id="other", boot_id="other", transports=["memory", "shared_memory", "inline"]) as offer:
        assert list(sources_by_name(offer)) == ["inline"]
        assert dict(offer.refusals) == {"memory": "decode is another process", "shared_memory": "decode is on another host"}


@pytest.mark.parametrize("field", ["dtype", "model_fingerprint", "version", "num_layers", "num_kv_heads", "head_dim"])
async def test_layouts_that_cannot_be_converted_are_refused_by_field(node: PrefillNode, field: str) -> None:
    layout = kv_layout_to_proto(node.engine.model.layout)
    setattr(layout, field, "other" if isinstance(getattr(layout, field), str) else 99)
    status = await _pair_refused(node, pair_start(node, layout=layout))
    assert (status.code, status.reason, list(status.metadata)) == (grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH", [field])


async def test_another_block_size_pairs(node: PrefillNode) -> None:
    layout = kv_layout_to_proto(node.engine.model.layout)
    layout.block_size *= 2
    async with paired(node, layout=layout) as offer:
        assert offer.layout.block_size == node.engine.model.layout.block_size


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"nonce": b""}, "start.nonce"),
        ({"nonce": bytes(31)}, "start.nonce"),
        ({"transports": []}, "start.transports"),
        ({"transports": ["inline"] * 17}, "start.transports"),
        ({"transports": ["i" * 65]}, "start.transports"),
        ({"boot_id": "b" * 65}, "start.boot_id"),
    ],
)
async def test_bad_starts_are_refused_by_field(node: PrefillNode, fields: dict[str, Any], field: str) -> None:
    status = await _pair_refused(node, pair_start(node, **fields))
    assert (status.code, status.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(("transport", "bytes_per_s", "field"), [("memory", 1.0, "choice.transport"), ("inline", float("nan"), "choice.bytes_per_s")])
async def test_a_choice_of_what_was_not_offered_ends_the_pairing(node: PrefillNode, transport: str, bytes_per_s: float, field: str) -> None:
    call = node.stub.Pair(timeout=20)
    await call.write(pair_start(node))
    await call.read()
    await call.write(prefill_pb2.PairRequest(choice=prefill_pb2.PairChoice(transport=transport, bytes_per_s=bytes_per_s)))
    assert (await _refused(call)).field == field


async def test_a_change_of_path_is_a_warning(node: PrefillNode, caplog: pytest.LogCaptureFixture) -> None:
    call = node.stub.Pair(timeout=20)
    await call.write(pair_start(node, transports=["memory", "inline"]))
    await call.read()
    for transport in ("memory", "memory", "inline"):
        await call.write(prefill_pb2.PairRequest(choice=prefill_pb2.PairChoice(transport=transport, bytes_per_s=2e9)))
    await until(lambda: "has changed its path from memory to inline (2.000 GB/s)" in caplog.text)
    assert caplog.text.count("has changed its path") == 1
    call.cancel()


async def test_more_pairings_than_the_limit_are_refused_and_make_room_when_they_end(node: PrefillNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.pool.pairings, "_max_pairings", 1)
    async with paired(node):
        status = await _pair_refused(node, pair_start(node))
        assert (status.code, status.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_PAIRINGS")
    await until(lambda: len(node.pool.pairings) == 0)
    async with paired(node) as offer:
        assert offer.pairing_id


async def test_a_silent_peer_does_not_keep_a_pairing(node: PrefillNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairings, "_MAX_START_S", 0.1)
    status = await asyncio.wait_for(_refused(node.stub.Pair(timeout=20)), 5)
    assert (status.code, status.metadata) == (grpc.StatusCode.DEADLINE_EXCEEDED, {"phase": "pair"})


@pytest.mark.parametrize("pairing_id", ["", "0" * 32])
async def test_nothing_works_under_an_unknown_pairing(node: PrefillNode, pairing_id: str) -> None:
    read = node.stub.ReadKv(prefill_pb2.ReadKvRequest(pairing_id=pairing_id))
    for call in (await _prefill(node, pairing_id), read):
        status = await _refused(call)
        assert (status.code, status.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PAIRING_UNKNOWN")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await node.stub.WriteKv(prefill_pb2.WriteKvRequest(pairing_id=pairing_id))
    assert StatusError.of(refused.value).reason == "PAIRING_UNKNOWN"
    assert (await node.engine.report()).num_steps == 0


async def test_writes_are_refused_where_no_source_writes(node: PrefillNode) -> None:
    async with paired(node) as offer:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.stub.WriteKv(prefill_pb2.WriteKvRequest(pairing_id=offer.pairing_id))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert ("tandem-stopped", "1") in tuple(refused.value.trailing_metadata())


async def test_a_hold_is_not_found_under_another_pairing(node: PrefillNode) -> None:
    async with paired(node) as mine, paired(node) as other:
        call, hold_id = await _held(node, mine.pairing_id)
        foreign = prefill_pb2.ReadKvRequest(pairing_id=other.pairing_id, hold_id=hold_id, first_block=0, num_blocks=1)
        status = await _refused(node.stub.ReadKv(foreign))
        assert (status.code, status.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "HOLD_UNKNOWN")
        call.cancel()


@pytest.mark.parametrize("phase", ["computing", "held"])
async def test_the_end_of_a_pairing_ends_what_works_under_it(node: PrefillNode, phase: str) -> None:
    async with paired(node) as offer, paired(node) as other:
        if phase == "computing":
            node.device.gate = threading.Event()
            call = await _prefill(node, offer.pairing_id)
            await asyncio.to_thread(node.device.entered.wait, 5)
        else:
            call, _ = await _held(node, offer.pairing_id)
        node.pool.pairings.find(offer.pairing_id).end()
        if node.device.gate is not None:
            node.device.gate.set()
        status = await asyncio.wait_for(_refused(call), 5)
        assert (status.code, status.reason) == (grpc.StatusCode.ABORTED, "PAIRING_ENDED")
        await assert_nothing_held(node.engine)
        again, _ = await _held(node, other.pairing_id)
        again.cancel()


async def test_a_pairing_that_ends_while_the_first_answer_is_sent_still_says_so(node: PrefillNode, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Conversation._write

    async def cut(talk: Conversation, **step: Any) -> None:
        asyncio.get_running_loop().call_soon(node.pool.pairings.find(talk._prompt.pairing_id).end)
        await write(talk, **step)

    monkeypatch.setattr(Conversation, "_write", cut)
    async with paired(node) as offer:
        status = await asyncio.wait_for(_refused(await _prefill(node, offer.pairing_id)), 5)
        assert (status.code, status.reason) == (grpc.StatusCode.ABORTED, "PAIRING_ENDED")


async def test_decode_going_away_ends_its_pairing(node: PrefillNode) -> None:
    async with paired(node):
        assert len(node.pool.pairings) == 1
        await node.channel.close(None)  # as when decode's process dies
        await until(lambda: len(node.pool.pairings) == 0)


async def test_one_sided_runs_carry_odd_generations_and_digests_when_asked(node: PrefillNode) -> None:
    async with paired(node, transports=["shared_memory", "inline"]) as offer:
        call = node.stub.Prefill(timeout=20)
        params = sampling_params_to_proto(SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        start = prefill_pb2.PrefillStart(
            request_id="r", pairing_id=offer.pairing_id, prompt_token_ids=PROMPT, sampling_params=params, transport="shared_memory", checksum=True
        )
        await call.write(prefill_pb2.PrefillRequest(start=start))
        ready = (await call.read()).kv_ready
        assert len(ready.block_ids) == len(ready.generations) == len(ready.digests) == ready.num_blocks > 0
        assert all(generation % 2 for generation in ready.generations)
        for block, digest in zip(ready.block_ids, ready.digests, strict=True):
            assert digest == xxhash.xxh3_64_intdigest(node.engine.kv_cache.blocks[block])
        call.cancel()
