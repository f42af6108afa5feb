"""The control: a worker of this process believes everything, so that faults become wrong tokens. No flag of Tandem's does this."""

from __future__ import annotations

from typing import Any

import xxhash

from checks.handover_faults_line import put_around
from decode_svc.prefill_call import PrefillCall
from engine.async_engine import AsyncEngine
from kvtransfer import chunks
from kvtransfer.chunks import RunCheck
from kvtransfer.handover import Handover
from kvtransfer.mapped_pool import MappedPool
from kvtransfer.nixl_pull import NixlPull
from kvtransfer.path import KvPath
from prefill_svc.conversation import Conversation


def believe_everything() -> None:
    """Digests, generations, chunks, the hold's confirmation and the end of the Prefill RPC are not looked at."""
    put_around(RunCheck, "accept", lambda _: _accept_in_any_order)
    put_around(RunCheck, "finish", lambda _: _not_at_all)
    put_around(KvPath, "_verify", lambda _: _not_at_all_async)
    put_around(MappedPool, "are_held", lambda _: _yes)
    put_around(NixlPull, "_look", lambda _: _not_at_all_async)
    put_around(xxhash, "xxh3_64_intdigest", lambda _: _any_digest)
    put_around(AsyncEngine, "confirm", lambda _: _confirm)
    put_around(PrefillCall, "copied", lambda _: _copied)
    put_around(PrefillCall, "confirm", lambda _: _not_at_all_async)
    put_around(Conversation, "_check_copied", lambda _: _not_at_all)


class _AnyDigest(int):
    """Equal to every digest."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


def _any_digest(_: Any) -> int:
    return _AnyDigest()


def _accept_in_any_order(check: RunCheck, message: bytes) -> tuple[int, memoryview]:
    start, _ = chunks._unpack(message)
    payload = memoryview(message)[start:]
    offset, check.num_received = check.num_received, check.num_received + len(payload)
    return offset, payload


def _not_at_all(*_: Any) -> None:
    pass


async def _not_at_all_async(*_: Any) -> None:
    pass


async def _copied(_: PrefillCall, handover: Handover) -> int:
    """Whatever has become of the RPC."""
    return await handover.covered()


def _yes(*_: Any) -> bool:
    return True


async def _confirm(*_: Any) -> bool:
    return True
