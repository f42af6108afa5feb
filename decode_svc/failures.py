"""What a failed attempt at a prefill instance means: the caller's own end, the caller's mistake, or a reason to try elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from engine.errors import HoldBrokenError
from engine.proto import FieldError
from kvtransfer.errors import ChunkError, DigestError, HandoverError, HandoverProtocolError, SourceGoneError, StaleBlockError, StalledError
from rpc.deadline import HOP_MARGIN_S
from rpc.errors import StatusError, deadline_exceeded

# The callee's deadline is a margin in front of ours; what comes later than two before our end is our own end.
_OWN_END_S = 2 * HOP_MARGIN_S
_KV_REASONS = (
    (ChunkError, "CHUNK"),
    (DigestError, "DIGEST"),
    (StaleBlockError, "STALE_BLOCK"),
    (SourceGoneError, "SOURCE_GONE"),
    (StalledError, "STALLED"),
    (HandoverProtocolError, "PROTOCOL"),
)
MAX_DESCRIPTION_CHARS = 512
"""More of what a peer says is not repeated: a status with too much text is lost on its way, and a report is sent again and again."""
PAIRING_UNKNOWN = "PAIRING_UNKNOWN"
"""Prefill knows no such pairing: what another attempt there would not meet."""


class AttemptFailedError(Exception):
    """One attempt at one prefill instance came to nothing; its copy is thrown away.

    `reason` is of a closed set, for metrics. `pairs` is False when the two pools do not pair, which no other attempt there can change.
    """

    def __init__(self, instance: str, reason: str, description: str, *, pairs: bool = True) -> None:
        self.instance = instance
        self.reason = reason
        self.description = description[:MAX_DESCRIPTION_CHARS]
        super().__init__(f"{instance}: {self.description}")
        self.pairs = pairs


def is_own_cancel() -> bool:
    """Somebody cancels this RPC. grpc.aio raises CancelledError also when the peer ended a call with CANCELLED: then nobody has cancelled this task."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def is_own_end(remaining_s: float) -> bool:
    """The deadline of this RPC has as good as passed: what fails now, fails by it."""
    return remaining_s <= _OWN_END_S


@contextmanager
def attempt_at(instance: str, context: grpc.aio.ServicerContext[object, object], *, resumes: bool) -> Iterator[None]:
    """Sorts what leaves the block: StatusError for the caller's own end or mistake, AttemptFailedError for the rest; a cancel of this RPC stays one.

    What `resumes` a sequence is no mistake of the caller: only this instance is too small for it.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _sort(error, instance, context, resumes) from error
    except (HandoverError, FieldError) as error:
        reason = next((name for kind, name in _KV_REASONS if isinstance(error, kind)), "HANDOVER")
        raise AttemptFailedError(instance, reason, str(error)) from error
    except HoldBrokenError as error:
        raise AttemptFailedError(instance, "RESERVATION_GONE", str(error)) from error
    except asyncio.CancelledError:
        if is_own_cancel():
            raise
        raise AttemptFailedError(instance, "CANCELLED", "the instance ended the call with CANCELLED") from None


def _sort(error: grpc.aio.AioRpcError, instance: str, context: grpc.aio.ServicerContext[object, object], resumes: bool) -> StatusError | AttemptFailedError:
    code = error.code()
    remaining: float | None = context.time_remaining()
    if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED) and remaining is not None and is_own_end(remaining):
        return deadline_exceeded("prefill")
    status = StatusError.of(error)
    if code is grpc.StatusCode.INVALID_ARGUMENT and not resumes:
        return status
    description = f"{code.name} {status.message}"
    if status.reason == PAIRING_UNKNOWN:
        return AttemptFailedError(instance, PAIRING_UNKNOWN, description)
    return AttemptFailedError(instance, code.name, description, pairs=code is not grpc.StatusCode.FAILED_PRECONDITION)
