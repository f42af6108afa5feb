"""The control: a worker of this process believes everything, so that faults become wrong tokens. No flag of Tandem's does this."""

from __future__ import annotations

from typing import Any

from checks.handover_faults_line import put_around
from engine.async_engine import AsyncEngine
from kvtransfer import chunks
from kvtransfer.chunks import RunCheck
from kvtransfer.mapped_pool import MappedPool
from kvtransfer.path import KvPath
from prefill_svc.conversation import Conversation


def believe_everything() -> None:
    """Digests, generations, chunks and the hold's confirmation are not looked at."""
    put_around(RunCheck, "accept", lambda _: _accept_in_any_order)
    put_around(RunCheck, "finish", lambda _: _not_at_all)
    put_around(KvPath, "_verify", lambda _: _not_at_all_async)
    put_around(MappedPool, "are_held", lambda _: _yes)
    put_around(AsyncEngine, "confirm", lambda _: _confirm)
    put_around(Conversation, "_check_copied", lambda _: _not_at_all)


def _accept_in_any_order(check: RunCheck, message: bytes) -> tuple[int, memoryview]:
    start, _ = chunks._unpack(message)
    payload = memoryview(message)[start:]
    offset, check.num_received = check.num_received, check.num_received + len(payload)
    return offset, payload


def _not_at_all(*_: Any) -> None:
    pass


async def _not_at_all_async(*_: Any) -> None:
    pass


def _yes(*_: Any) -> bool:
    return True


async def _confirm(*_: Any) -> bool:
    return True
