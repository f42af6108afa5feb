"""Prefill's side of the conversation: what it computes, what it refuses, and that every end of the RPC gives its blocks back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import pytest

from engine.proto import sampling_params_to_proto
from engine.sampling_params import SamplingParams
from kvtransfer.hold import CONFIRMED
from rpc.errors import StatusError
from tandem.v1 import prefill_pb2
from tests.support.alone import alone
from tests.support.cluster import PrefillNode, open_prefill, until
from tests.support.held import assert_nothing_held
from tests.support.pair_call import paired

PROMPT = list(range(100, 130))
NUM_BLOCKS = 8


@pytest.fixture
async def node() -> AsyncIterator[PrefillNode]:
    async with open_prefill("p0") as opened, paired(opened) as offer:
        opened.pairing_id = offer.pairing_id
        yield opened
        if opened.device.gate is not None:
            opened.device.gate.set()
        if opened.engine.death is None:
            await assert_nothing_held(opened.engine)
        assert len(opened.pool.holds) == 0


def _start(node: PrefillNode, **fields: Any) -> prefill_pb2.PrefillRequest:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    start = prefill_pb2.PrefillStart(
        request_id="r",
        pairing_id=node.pairing_id,
        prompt_token_ids=PROMPT,
        sampling_params=sampling_params_to_proto(sampling),
        transport="inline",
    )
    start.MergeFrom(prefill_pb2.PrefillStart(**fields))
    return prefill_pb2.PrefillRequest(start=start)


def _copied(hold_id: str, num_blocks: int) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(copied=prefill_pb2.Copied(hold_id=hold_id, num_blocks=num_blocks))


def _read(node: PrefillNode, hold_id: str, first_block: int, num_blocks: int) -> prefill_pb2.ReadKvRequest:
    return prefill_pb2.ReadKvRequest(pairing_id=node.pairing_id, hold_id=hold_id, first_block=first_block, num_blocks=num_blocks)


async def _refused(call: Any) -> StatusError:
    """Reads to the end, which must be an error."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return StatusError.of(error)
    raise AssertionError("the RPC ended OK")


class Conversation:
    """Plays decode."""

    def __init__(self, node: PrefillNode, timeout_s: float | None = 20) -> None:
        self.node = node
        self.call = node.stub.Prefill(timeout=timeout_s)
        self.ready: list[Any] = []

    async def start(self, **fields: Any) -> Conversation:
        await self.call.write(_start(self.node, **fields))
        return self

    async def done(self) -> prefill_pb2.PrefillDone:
        while True:
            response = await self.call.read()
            assert response is not grpc.aio.EOF
            if response.WhichOneof("step") == "done":
                return response.done  # type: ignore[no-any-return]
            self.ready.append(response.kv_ready)

    async def read_all(self) -> bytes:
        """Reads every announced run with the generated stub: the raw messages are true ReadKvResponses."""
        data = b""
        for ready in self.ready:
            async for response in self.node.stub.ReadKv(_read(self.node, ready.hold_id, ready.first_block, ready.num_blocks)):
                data += response.chunk[24:]
        return data

    async def refused(self) -> StatusError:
        return await _refused(self.call)


async def test_a_hold_lasts_until_it_is_confirmed(node: PrefillNode) -> None:
    talk = await Conversation(node).start()
    done = await talk.done()
    assert [first.token_id for first in done.first_tokens] == alone(PROMPT)[:1]
    assert (done.num_blocks, done.computed_tokens, done.cached_tokens) == (NUM_BLOCKS, len(PROMPT), 0)
    assert len(done.hold_id) == 32
    assert [ready.first_block for ready in talk.ready] == [0, 2, 4, 6]
    assert len(await talk.read_all()) == NUM_BLOCKS * 128
    assert (await node.engine.report()).sequences_by_state == {"held": 1}
    await talk.call.write(_copied(done.hold_id, NUM_BLOCKS))
    assert await talk.call.read() is grpc.aio.EOF
    assert await talk.call.code() is grpc.StatusCode.OK
    assert dict(await talk.call.trailing_metadata() or ())[CONFIRMED] == done.hold_id


async def test_blocks_are_announced_while_later_ones_are_computed(node: PrefillNode) -> None:
    talk = await Conversation(node).start()
    first = await talk.call.read()
    node.device.gate = threading.Event()
    assert (first.kv_ready.first_block, first.kv_ready.num_blocks) == (0, 2)
    node.device.gate.set()
    await talk.done()
    talk.call.cancel()


async def test_cached_blocks_are_announced_at_once_and_those_of_decode_never(node: PrefillNode) -> None:
    talk = await Conversation(node).start()
    await talk.done()
    talk.call.cancel()
    again = await Conversation(node).start(num_cached_tokens=8)
    done = await again.done()
    assert done.cached_tokens == 28
    assert [(ready.first_block, ready.num_blocks) for ready in again.ready] == [(2, 6)]
    await again.read_all()
    await again.call.write(_copied(done.hold_id, 6))
    assert await again.call.read() is grpc.aio.EOF
    assert dict(await again.call.trailing_metadata() or ())[CONFIRMED] == done.hold_id


async def test_without_a_transport_only_the_first_token_is_wanted(node: PrefillNode) -> None:
    request = _start(node)
    request.start.transport = ""
    call = node.stub.Prefill(timeout=20)
    await call.write(request)
    done = (await call.read()).done
    assert [first.token_id for first in done.first_tokens] == alone(PROMPT)[:1]
    assert (done.hold_id, done.num_blocks) == ("", 0)
    assert await call.read() is grpc.aio.EOF
    await assert_nothing_held(node.engine)


async def test_an_end_of_input_is_a_cancel_and_never_consent(node: PrefillNode) -> None:
    talk = await Conversation(node).start()
    await talk.done()
    await talk.read_all()
    await talk.call.done_writing()
    assert (await talk.refused()).code is grpc.StatusCode.CANCELLED


async def test_an_end_of_input_while_computing_stops_the_computing(node: PrefillNode) -> None:
    node.device.gate = threading.Event()
    talk = await Conversation(node).start()
    await asyncio.to_thread(node.device.entered.wait, 5)
    await talk.call.done_writing()
    assert (await talk.refused()).code is grpc.StatusCode.CANCELLED
    node.device.gate.set()
    await assert_nothing_held(node.engine)
    assert (await node.engine.report()).computed_prompt_tokens == 8


@pytest.mark.parametrize("phase", ["computing", "held", "read"])
async def test_decode_going_away_gives_everything_back(node: PrefillNode, phase: str) -> None:
    if phase == "computing":
        node.device.gate = threading.Event()
    talk = await Conversation(node).start()
    if phase == "computing":
        await asyncio.to_thread(node.device.entered.wait, 5)
    else:
        await talk.done()
    if phase == "read":
        await talk.read_all()
    await node.channel.close(None)  # as when decode's process dies
    if node.device.gate is not None:
        node.device.gate.set()
    await assert_nothing_held(node.engine)


async def test_copied_without_reads_is_not_confirmed(node: PrefillNode) -> None:
    talk = await Conversation(node).start()
    done = await talk.done()
    await talk.call.write(_copied(done.hold_id, NUM_BLOCKS))
    status = await talk.refused()
    assert (status.code, status.reason) == (grpc.StatusCode.ABORTED, "COPIED_UNREAD")


@pytest.mark.parametrize(("hold_id", "num_blocks"), [(None, NUM_BLOCKS - 1), ("0" * 32, NUM_BLOCKS)])
async def test_copied_of_something_else_is_not_confirmed(node: PrefillNode, hold_id: str | None, num_blocks: int) -> None:
    talk = await Conversation(node).start()
    done = await talk.done()
    await talk.read_all()
    await talk.call.write(_copied(hold_id or done.hold_id, num_blocks))
    status = await talk.refused()
    assert (status.code, status.reason) == (grpc.StatusCode.ABORTED, "COPIED_MISMATCH")


async def test_copied_before_the_prompt_is_computed_is_refused(node: PrefillNode) -> None:
    node.device.gate = threading.Event()
    talk = await Conversation(node).start()
    await talk.call.write(_copied("x", 1))
    assert (await talk.refused()).field == "step"
    node.device.gate.set()


async def test_a_conversation_begins_with_start(node: PrefillNode) -> None:
    talk = Conversation(node)
    await talk.call.write(_copied("x", 1))
    assert (await talk.refused()).field == "step"
    silent = Conversation(node)
    await silent.call.done_writing()
    assert (await silent.refused()).field == "step"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_token_ids": [1000]}, "prompt_token_ids"),
        ({"output_token_ids": [1] * 8}, "output_token_ids"),
        ({"num_cached_tokens": 31}, "num_cached_tokens"),
        ({"transport": "shared_memory"}, "transport"),
        ({"transport": "carrier_pigeon"}, "transport"),
    ],
)
async def test_bad_starts_are_refused_by_field(node: PrefillNode, fields: dict[str, Any], field: str) -> None:
    status = await (await Conversation(node).start(**fields)).refused()
    assert (status.code, status.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_a_prompt_over_the_limit_never_reaches_the_engine(node: PrefillNode) -> None:
    status = await (await Conversation(node).start(prompt_token_ids=[1] * 100)).refused()
    assert (status.code, status.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids")
    assert "130 tokens are over max_model_len (128)" in status.message


@pytest.mark.parametrize("phase", ["silent", "computing", "held"])
async def test_no_hold_outlives_the_longest_request_time(phase: str) -> None:
    async with open_prefill("p0", max_request_time_s=0.3) as node, paired(node) as offer:
        node.pairing_id = offer.pairing_id
        talk = Conversation(node, timeout_s=None)
        if phase == "computing":
            node.device.gate = threading.Event()
        if phase != "silent":
            await talk.start()
        if phase == "held":
            await talk.done()
        status = await talk.refused()
        assert (status.code, status.metadata) == (grpc.StatusCode.DEADLINE_EXCEEDED, {"phase": "prefill"})
        if node.device.gate is not None:
            node.device.gate.set()
        await assert_nothing_held(node.engine)
        assert len(node.pool.holds) == 0


async def test_a_guessed_hold_cannot_be_read_and_a_wrong_run_is_named(node: PrefillNode) -> None:
    talk = await Conversation(node).start()
    done = await talk.done()
    for hold_id, first, code in (("f" * 32, 0, grpc.StatusCode.FAILED_PRECONDITION), (done.hold_id, 7, grpc.StatusCode.INVALID_ARGUMENT)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.stub.ReadKv(_read(node, hold_id, first, 2)).read()
        assert refused.value.code() is code
        assert done.hold_id not in str(refused.value.details())
    talk.call.cancel()


async def test_a_hold_that_closes_while_the_first_chunk_is_being_sent_ends_the_read(node: PrefillNode, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = await Conversation(node).start()
    done = await talk.done()
    inline = node.pool.sources.inline
    assert inline is not None
    chunks = inline._chunks

    def closing(ids: Sequence[int]) -> Iterator[tuple[int, list[memoryview], bool]]:
        hold = node.pool.holds.find(done.hold_id, node.pairing_id)
        asyncio.get_running_loop().call_soon(node.pool.holds.close, hold)  # runs once the message has been given to gRPC and is waited for
        yield from chunks(ids)

    monkeypatch.setattr(inline, "_chunks", closing)
    reading = node.stub.ReadKv(_read(node, done.hold_id, 0, 2))
    status = await asyncio.wait_for(_refused(reading), 5)
    assert (status.code, status.reason) == (grpc.StatusCode.ABORTED, "HOLD_CLOSED")
    talk.call.cancel()


async def test_a_failed_sequence_fails_alone(node: PrefillNode) -> None:
    poisoned = await Conversation(node).start(prompt_token_ids=[999])
    assert (await poisoned.refused()).code is grpc.StatusCode.INTERNAL
    talk = await Conversation(node).start()
    await talk.done()
    talk.call.cancel()


async def test_a_dead_engine_ends_every_rpc(node: PrefillNode) -> None:
    held = await Conversation(node).start()
    done = await held.done()
    await held.read_all()
    deaths: list[BaseException] = []
    node.engine.on_death(deaths.append)
    node.device.fail_next = RuntimeError("device lost")
    computing = await Conversation(node).start()
    assert (await computing.refused()).reason == "ENGINE_DEAD"
    await held.call.write(_copied(done.hold_id, NUM_BLOCKS))
    assert (await held.refused()).reason == "ENGINE_DEAD"
    assert len(deaths) == 1


async def test_load_is_reported_now_and_when_it_changes(node: PrefillNode) -> None:
    watch = node.stub.WatchLoad(prefill_pb2.PrefillServiceWatchLoadRequest())
    load = (await watch.read()).load
    assert (load.ready, load.num_blocks, load.num_free_blocks, load.block_size, load.vocab_size) == (True, 64, 64, 4, 1000)
    talk = await Conversation(node).start()
    await talk.done()
    while load.num_requests_in_handover != 1:
        load = (await watch.read()).load
    assert load.num_free_blocks == 64 - NUM_BLOCKS
    talk.call.cancel()
    node.load.set_draining()
    while not load.draining:
        load = (await watch.read()).load
    assert not load.ready
    watch.cancel()


async def test_the_memory_report_names_owners(node: PrefillNode) -> None:
    talk = await Conversation(node).start()
    await talk.done()
    memory = (await node.stub.GetMemoryReport(prefill_pb2.PrefillServiceGetMemoryReportRequest())).memory
    assert (memory.num_holds, memory.num_active_rpcs, memory.num_held_blocks) == (1, 1, NUM_BLOCKS)
    assert memory.num_free_blocks + memory.num_cached_blocks + memory.num_held_blocks == memory.num_blocks
    assert any(owner.name.startswith("sequence:r#") and owner.num_blocks == NUM_BLOCKS for owner in memory.owners)
    talk.call.cancel()
    await until(lambda: node.server.num_active_rpcs == 0)
