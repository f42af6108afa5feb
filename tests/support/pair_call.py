"""A Pair RPC as decode opens it, by hand."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine.proto import kv_layout_to_proto
from kvtransfer.pairing import NONCE_BYTES, PROCESS_ID, boot_id
from tandem.v1 import prefill_pb2
from tests.support.cluster import PrefillNode


def pair_start(node: PrefillNode, **fields: Any) -> prefill_pb2.PairRequest:
    """Decode's first message, to a prefill worker over an equal pool; `fields` replace those of PairStart."""
    start: dict[str, Any] = {
        "layout": kv_layout_to_proto(node.engine.model.layout),
        "process_id": PROCESS_ID,
        "boot_id": boot_id(),
        "transports": ["inline"],
        "nonce": secrets.token_bytes(NONCE_BYTES),
    }
    return prefill_pb2.PairRequest(start=prefill_pb2.PairStart(**start | fields))


@asynccontextmanager
async def paired(node: PrefillNode, **fields: Any) -> AsyncIterator[prefill_pb2.PairResponse]:
    """What prefill offers; the pairing lasts as long as the block."""
    call = node.stub.Pair(timeout=60)
    try:
        await call.write(pair_start(node, **fields))
        yield await call.read()
    finally:
        call.cancel()
