"""Both ends of a pairing can prove to have its key, and nobody else can."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from engine.kv_cache import HostKvCache, KvLayout
from kvtransfer.descriptor_sockets import Fetched, _Published
from kvtransfer.errors import HandoverProtocolError, NoTransportError
from kvtransfer.hold import Holds
from kvtransfer.host_pool import HostPool
from kvtransfer.memory import MemoryReader, MemorySource
from kvtransfer.pairing import NONCE_BYTES, PROCESS_ID, Pairing, boot_id, pairing_key, proof, require_same_host, sources_by_name
from kvtransfer.quarantine import Quarantine
from kvtransfer.transport import References
from tandem.v1 import kv_pb2, prefill_pb2

_A, _B = b"a" * NONCE_BYTES, b"b" * NONCE_BYTES


def test_keys_and_proofs_differ_with_each_nonce_and_role() -> None:
    keys = [pairing_key(one, other) for one, other in itertools.product((_A, _B), repeat=2)]
    proofs = [proof(key, role) for key in keys for role in ("decode", "prefill")]
    assert len(set(keys)) == 4
    assert len(set(proofs)) == 8
    assert {len(value) for value in proofs} == {32}
    assert not {*keys} & {*proofs}


def test_both_ends_make_the_same_key() -> None:
    pairing = Pairing(prefill_pb2.PairStart(nonce=_A))
    assert pairing.key == pairing_key(_A, pairing.nonce)
    assert proof(pairing.key, "decode") == proof(pairing_key(_A, pairing.nonce), "decode")


@pytest.mark.parametrize("nonce", [b"", _A[:-1], _A + b"a"])
def test_a_nonce_of_another_size_makes_no_key(nonce: bytes) -> None:
    for nonces in ((nonce, _A), (_A, nonce)):
        with pytest.raises(HandoverProtocolError, match="32 bytes"):
            pairing_key(*nonces)
    with pytest.raises(HandoverProtocolError):
        _ = Pairing(prefill_pb2.PairStart(nonce=nonce)).key


def test_no_two_pairings_share_an_id_or_a_nonce_and_none_shows_its_own() -> None:
    start = prefill_pb2.PairStart(nonce=_A)
    one, other = Pairing(start), Pairing(start)
    assert one.pairing_id != other.pairing_id
    assert one.nonce != other.nonce
    assert len(one.nonce) == NONCE_BYTES
    assert repr(one.nonce)[2:-1] not in repr(one)


def test_another_boot_is_another_host() -> None:
    require_same_host(Pairing(prefill_pb2.PairStart(boot_id=boot_id())))
    for other in ("", PROCESS_ID):
        with pytest.raises(NoTransportError, match="another host"):
            require_same_host(Pairing(prefill_pb2.PairStart(boot_id=other)))


def test_offers_of_transports_that_this_build_does_not_know_are_left_out() -> None:
    unknown = kv_pb2.KvSource.FromString(b"\x7a\x00")  # field 15
    inline = kv_pb2.KvSource(inline=kv_pb2.InlineSource(chunk_bytes=1))
    assert dict(sources_by_name(prefill_pb2.PairResponse(sources=[unknown, inline]))) == {"inline": inline}


def test_nothing_that_both_ends_keep_to_themselves_is_shown() -> None:
    start = prefill_pb2.PairStart(nonce=b"secret" + _A[6:], nixl_staging=kv_pb2.NixlStaging(agent_metadata=b"secret"))
    for one in (Pairing(start), Fetched(b"secret", (1,)), _Published(b"secret", b"secret", [])):
        assert "secret" not in repr(one)


async def test_a_probe_from_memory_counts_its_copy_and_no_wait_for_a_thread() -> None:
    cache, busy = HostKvCache(KvLayout("f", "float16", 1, 1, 8, 16), 2), threading.Event()
    with ThreadPoolExecutor(1) as executor:
        source, reader = MemorySource(HostPool(cache), Holds(cast(References, None), Quarantine())), MemoryReader(executor)
        pairing = Pairing(prefill_pb2.PairStart(process_id=PROCESS_ID))
        await reader.attach(prefill_pb2.PairResponse(pairing_id=pairing.pairing_id), await source.offer(pairing))
        executor.submit(busy.wait, 10)
        asyncio.get_running_loop().call_later(0.3, busy.set)
        probe = await reader.probe()
        source.close()
    assert bytes(probe.content) == cache.probe.tobytes()
    assert probe.elapsed_s < 0.3
    cache.close()
