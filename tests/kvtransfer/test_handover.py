"""A hand-over covers a prompt exactly once or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvtransfer.errors import HandoverError, HandoverProtocolError
from kvtransfer.hold import Hold, host_of
from kvtransfer.transport import choose_source
from tandem.v1 import kv_pb2
from tests.kvtransfer.ends import Ends, open_ends, until
from tests.support.held import assert_nothing_held

PROMPT = tuple(range(100, 122))

Announcements = Callable[[Ends, Hold], list[kv_pb2.KvReady]]
FAULTS: dict[str, Announcements] = {
    "out of order": lambda e, h: [e.ready(h, 2, 2)],
    "twice": lambda e, h: [e.ready(h, 0, 2), e.ready(h, 0, 2)],
    "overlapping": lambda e, h: [e.ready(h, 0, 2), e.ready(h, 1, 2)],
    "a gap": lambda e, h: [e.ready(h, 0, 2), e.ready(h, 3, 1)],
    "beyond the end": lambda e, h: [e.ready(h, 0, 7)],
    "empty": lambda e, h: [e.ready(h, 0, 0)],
    "another hold": lambda e, h: [e.ready(h, 0, 2), e.ready(e.hold(0, 6), 2, 2)],
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_announcements_that_are_not_due_are_protocol_errors(fault: str) -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, 6), ends.handover(reserved)
        hold.announce(6)
        *due, faulty = FAULTS[fault](ends, hold)
        for ready in due:
            handover.announce(ready)
        with pytest.raises(HandoverProtocolError):
            handover.announce(faulty)
        handover.stop()
        for each in ends.holds:
            ends.holds.close(each)
        ends.prefill.release("p")
        ends.decode.release("d")
        await assert_nothing_held(ends.prefill, ends.decode)


async def test_a_transport_that_was_not_offered_is_a_protocol_error() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        handover = ends.handover(await ends.reserve(PROMPT))
        ready = ends.ready(ends.hold(0, 6), 0, 6)
        ready.source.inline.chunk_bytes = 1
        with pytest.raises(HandoverProtocolError, match="inline was not offered"):
            handover.announce(ready)
        ready.ClearField("source")
        with pytest.raises(HandoverProtocolError, match="unknown"):
            handover.announce(ready)
        handover.stop()


async def test_blocks_that_were_never_announced_do_not_cover() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        handover = ends.handover(await ends.reserve(PROMPT))
        hold = ends.hold(0, 6)
        hold.announce(5)
        handover.announce(ends.ready(hold, 0, 5))
        with pytest.raises(HandoverProtocolError, match="5 of 6"):
            await handover.covered()
        handover.stop()


async def test_a_prompt_that_decode_has_whole_is_covered_at_once() -> None:
    async with open_ends("memory") as ends:
        prompt = PROMPT[:20]
        first = await ends.compute(prompt)
        reserved = await ends.reserve(prompt)
        hold, handover = ends.hold(0, 5), ends.handover(reserved)
        hold.announce(5)
        handover.announce(ends.ready(hold, 0, 5))
        await handover.covered()
        await ends.decode.commit("d", (first,))
        again = await ends.reserve(prompt, "again")
        assert again.num_cached_blocks == again.num_prompt_blocks == 5
        assert await ends.handover(again, "again").covered() == 0


async def test_a_read_that_fails_ends_the_step_that_was_waited_for() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        handover = ends.handover(await ends.reserve(PROMPT))
        cancelled = asyncio.Event()

        async def step() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        hold = ends.hold(0, 6)
        handover.announce(ends.ready(hold, 0, 6))  # prefill's side never announced it
        with pytest.raises(HandoverError):
            await handover.guard(step())
        await asyncio.wait_for(cancelled.wait(), 5)
        handover.stop()


async def test_a_reservation_that_is_gone_fails_the_hand_over() -> None:
    async with open_ends("memory") as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        ends.decode.release("d")
        handover = ends.handover(reserved)
        hold = ends.hold(0, 6)
        hold.announce(6)
        handover.announce(ends.ready(hold, 0, 6))
        with pytest.raises(HandoverError, match="reading failed"):
            await handover.covered()
        handover.stop()


async def test_a_reader_that_does_not_end_is_named_alarmed_and_keeps_its_blocks(caplog: pytest.LogCaptureFixture) -> None:
    async with open_ends("memory", max_stop_s=0.02) as ends:
        await ends.compute(PROMPT)
        reserved = await ends.reserve(PROMPT)
        hold, handover = ends.hold(0, 6), ends.handover(reserved)
        hold.announce(6)
        ends.gate.num_free = 0
        handover.announce(ends.ready(hold, 0, 6))
        await asyncio.wait_for(ends.gate.reached.wait(), 5)
        handover.stop()
        stopped = asyncio.ensure_future(handover.stopped())
        ends.decode.release("d")
        (name,) = ends.decode_quarantine.reader_ids
        await until(lambda: "has not ended" in caplog.text)
        assert name in caplog.text
        report = await ends.decode.report()
        assert report.owners == {f"reader:{name}": 6}
        assert not stopped.done()
        ends.gate.open()
        await asyncio.wait_for(stopped, 5)
        ends.holds.close(hold)
        ends.prefill.release("p")
        await assert_nothing_held(ends.prefill, ends.decode)
        assert ends.decode_quarantine.reader_ids == ()


async def test_memory_is_offered_only_within_the_process() -> None:
    async with open_ends("memory") as memory, open_ends("inline") as inline:
        from kvtransfer.errors import NoTransportError
        from kvtransfer.memory import PROCESS_ID

        sources = {"memory": memory.source, "inline": inline.source}
        assert choose_source(["memory", "inline"], PROCESS_ID, sources)[0] == "memory"
        assert choose_source(["memory", "inline"], "elsewhere", sources)[0] == "inline"
        with pytest.raises(NoTransportError):
            choose_source(["memory"], "elsewhere", sources)


@pytest.mark.parametrize(
    ("peer", "host"), [("ipv4:10.0.0.1:99", "ipv4:10.0.0.1"), ("ipv6:%5B::1%5D:99", "ipv6:%5B::1%5D"), ("unix:/a", "unix:/a"), ("unix:", "unix:")]
)
def test_host_of_a_peer(peer: str, host: str) -> None:
    assert host_of(peer) == host
