"""Both ends of a pairing can prove to have its key, and nobody else can."""

from __future__ import annotations

import itertools

import pytest

from kvtransfer.errors import HandoverProtocolError, NoTransportError
from kvtransfer.pairing import NONCE_BYTES, PROCESS_ID, Pairing, boot_id, pairing_key, proof, require_same_host, sources_by_name
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
