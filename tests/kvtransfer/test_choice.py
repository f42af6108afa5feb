"""The first transport that proves itself is taken, and nothing of the others is left."""

from __future__ import annotations

import asyncio
import logging

import pytest
import xxhash

from kvtransfer.choice import MAX_PROBE_BYTES, choose
from kvtransfer.errors import NoTransportError, SourceGoneError
from tandem.v1 import kv_pb2, prefill_pb2
from tests.kvtransfer.scripted import ScriptedReader

FLOOR = 1.0


def _offer(*names: str, **refusals: str) -> prefill_pb2.PairResponse:
    offer = prefill_pb2.PairResponse(probe_bytes=5, probe_digest=xxhash.xxh3_64_intdigest(b"probe"), refusals=refusals)
    for name in names:
        source = kv_pb2.KvSource()
        getattr(source, name).SetInParent()
        offer.sources.append(source)
    return offer


async def _fail() -> None:
    raise SourceGoneError("gone")


async def _break() -> None:
    raise RuntimeError("a library broke its promise")


async def _hang() -> None:
    await asyncio.Event().wait()


async def test_the_first_in_decodes_order_is_taken_and_the_others_are_never_tried() -> None:
    first, second = ScriptedReader("inline"), ScriptedReader("memory")
    chosen = await choose(_offer("memory", "inline"), [first, second], min_bytes_per_s=FLOOR)
    assert chosen.reader is first
    assert chosen.bytes_per_s == 5.0
    assert chosen.reasons == {}
    assert (first.num_closed, second.num_closed) == (0, 1)
    assert not second.began.is_set()


async def test_one_below_the_floor_gives_way_to_a_later_one() -> None:
    slow, fast = ScriptedReader("shared_memory"), ScriptedReader("inline")
    slow.elapsed_s, fast.elapsed_s = 100.0, 1.0
    chosen = await choose(_offer("shared_memory", "inline"), [slow, fast], min_bytes_per_s=FLOOR)
    assert chosen.reader is fast
    assert "the floor" in chosen.reasons["shared_memory"]
    assert (slow.num_closed, fast.num_closed) == (1, 0)


async def test_when_all_are_below_the_floor_the_fastest_is_taken() -> None:
    readers = [ScriptedReader("shared_memory"), ScriptedReader("nixl"), ScriptedReader("inline")]
    for reader, elapsed_s in zip(readers, (50.0, 10.0, 30.0), strict=True):
        reader.elapsed_s = elapsed_s
    chosen = await choose(_offer("shared_memory", "nixl", "inline"), readers, min_bytes_per_s=FLOOR)
    assert chosen.reader is readers[1]
    assert [reader.num_closed for reader in readers] == [1, 0, 1]


async def test_why_each_was_not_taken_is_told() -> None:
    refused, unoffered = ScriptedReader("cuda_ipc"), ScriptedReader("nixl")
    failing, altered, broken = ScriptedReader("memory", attach=_fail), ScriptedReader("inline"), ScriptedReader("shared_memory", probe=_break)
    altered.content = b"prob3"
    readers = [refused, unoffered, failing, altered, broken]
    with pytest.raises(NoTransportError) as refusal:
        await choose(_offer("memory", "inline", "shared_memory", cuda_ipc="another GPU"), readers, min_bytes_per_s=FLOOR)
    for text in (
        "cuda_ipc: another GPU",
        "nixl: prefill does not offer it",
        "memory: gone",
        "inline: its probe brought other bytes",
        "RuntimeError: a library",
    ):
        assert text in str(refusal.value)
    assert [reader.num_closed for reader in readers] == [1] * 5


async def test_a_library_that_breaks_its_promise_costs_its_own_transport(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = ScriptedReader("nixl", attach=_break), ScriptedReader("inline")
    with caplog.at_level(logging.ERROR):
        assert (await choose(_offer("nixl", "inline"), [broken, sound], min_bytes_per_s=FLOOR)).reader is sound
    assert "nixl failed while it was tried" in caplog.text
    assert (broken.num_closed, sound.num_closed) == (1, 0)


@pytest.mark.parametrize("step", ["attach", "probe"])
async def test_a_step_that_hangs_is_given_up(step: str) -> None:
    hanging, sound = ScriptedReader("nixl", **{step: _hang}), ScriptedReader("inline")  # type: ignore[arg-type]
    chosen = await choose(_offer("nixl", "inline"), [hanging, sound], min_bytes_per_s=FLOOR, step_timeout_s=0.01)
    assert chosen.reader is sound
    assert "0.01 s" in chosen.reasons["nixl"]
    assert hanging.num_closed == 1


@pytest.mark.parametrize("step", ["attach", "probe"])
async def test_a_cancel_closes_all_readers(step: str) -> None:
    readers = [ScriptedReader("nixl", **{step: _hang}), ScriptedReader("inline")]  # type: ignore[arg-type]
    choosing = asyncio.ensure_future(choose(_offer("nixl", "inline"), readers, min_bytes_per_s=FLOOR))
    await asyncio.wait_for(readers[0].began.wait(), 5)
    choosing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await choosing
    assert [reader.num_closed for reader in readers] == [1, 1]


@pytest.mark.parametrize("probe_bytes", [0, MAX_PROBE_BYTES + 1])
async def test_a_probe_of_any_size_is_not_asked_for(probe_bytes: int) -> None:
    offer, reader = _offer("inline"), ScriptedReader("inline")
    offer.probe_bytes = probe_bytes
    with pytest.raises(NoTransportError, match="bytes"):
        await choose(offer, [reader], min_bytes_per_s=FLOOR)
    assert not reader.began.is_set()
    assert reader.num_closed == 1


async def test_nothing_to_choose_from_is_an_error_of_its_own() -> None:
    with pytest.raises(NoTransportError, match="decode reads by no transport"):
        await choose(_offer("inline"), [], min_bytes_per_s=FLOOR)
