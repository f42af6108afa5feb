"""Names of prefixes: a chain of SHA-256 over blocks of token ids, apart for every tenant, model and adapter."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_hash(tenant_salt: bytes, model_fingerprint: str, adapter: str = "") -> bytes:
    """The parent of a sequence's first block. Lengths go in too, so that no two (salt, model, adapter) share a root."""
    digest = hashlib.sha256(b"tandem-prefix-1")
    for part in (tenant_salt, model_fingerprint.encode(), adapter.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of a full block: all tokens up to its end, by way of its parent."""
    return hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()
