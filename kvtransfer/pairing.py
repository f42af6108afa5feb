"""What the two ends of a pairing know of each other."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from kvtransfer.errors import HandoverProtocolError, NoTransportError
from tandem.v1 import kv_pb2, prefill_pb2

PROCESS_ID = secrets.token_hex(16)
"""Tells this process from every other one; new with every start."""
NONCE_BYTES = 32


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Tells this host's kernel, as it runs now, from every other one. Containers of a host share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def require_same_host(pairing: Pairing) -> None:
    """Raises NoTransportError for a decode instance on another host."""
    if pairing.start.boot_id != boot_id():
        raise NoTransportError("decode is on another host")


def pairing_key(decode_nonce: bytes, prefill_nonce: bytes) -> bytes:
    """The key that both ends of a pairing can prove to have without telling it. Raises HandoverProtocolError for nonces that are none."""
    if len(decode_nonce) != NONCE_BYTES or len(prefill_nonce) != NONCE_BYTES:
        raise HandoverProtocolError(f"a nonce must have {NONCE_BYTES} bytes")
    return hashlib.sha256(b"tandem pairing" + decode_nonce + prefill_nonce).digest()


def proof(key: bytes, role: str) -> bytes:
    """What one end shows to the other: 32 bytes that only who has the key can make, another value for each role."""
    return hmac.digest(key, role.encode(), "sha256")


@dataclass(frozen=True, slots=True)
class Pairing:
    """Prefill's record of one Pair RPC."""

    start: prefill_pb2.PairStart = field(repr=False)
    pairing_id: str = field(default_factory=lambda: secrets.token_hex(16))
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES), repr=False)

    @property
    def key(self) -> bytes:
        """See pairing_key."""
        return pairing_key(self.start.nonce, self.nonce)


def sources_by_name(offer: prefill_pb2.PairResponse) -> Mapping[str, kv_pb2.KvSource]:
    """What was offered, by the transport's name; entries without one are left out."""
    return {name: source for source in offer.sources if (name := source.WhichOneof("transport"))}
