"""What a failed call of decode, or a refusal of admission, means for the request."""

from __future__ import annotations

import grpc

from gateway.admission import Refused
from rpc.deadline import HOP_MARGIN_S
from rpc.errors import StatusError, deadline_exceeded, exhausted, internal, invalid_argument, unavailable

_RETRY_AFTER_S = 1.0
_OWN_END_S = 3 * HOP_MARGIN_S
"""A callee's end is the caller's own when this little is left: a hop's margin on each side, and one for the way."""
_PASSED_ON = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED)
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED)


def is_short_of_room(failure: StatusError) -> bool:
    """Decode had no blocks, or as many sequences as it takes: the request goes back to the queue."""
    return failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failure.reason in ("NO_KV_BLOCKS", "NO_SEQUENCE_SLOT")


def may_go_elsewhere(failure: StatusError) -> bool:
    """Decode cannot be reached, drains or died; a hand-over that failed has used up its budget of attempts there."""
    return failure.code in _GONE and failure.reason != "HANDOVER_FAILED"


def client_status(failure: StatusError, *, remaining_s: float, phase: str, num_messages: int) -> StatusError:
    """The status that the client gets. Texts of the channel (addresses, library words) stay inside."""
    if failure.code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED) and remaining_s <= _OWN_END_S:
        return deadline_exceeded(failure.metadata.get("phase", phase))
    if failure.code in _PASSED_ON and failure.reason:
        return failure
    if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return deadline_exceeded(failure.metadata.get("phase", phase))
    if failure.code in _GONE:
        if failure.reason:
            return unavailable(failure.reason, failure.message, failure.retry_after_s or _RETRY_AFTER_S)
        lost = ("DECODE_LOST", "the decode instance was lost") if num_messages else ("NO_DECODE", "no decode instance could be reached")
        return unavailable(*lost, _RETRY_AFTER_S)
    return internal()


def refusal_status(refused: Refused) -> StatusError:
    """The status of a request that is not admitted."""
    reason, retry_after_s = refused.reason, refused.retry_after_s
    if reason == "TOO_LONG":
        return invalid_argument("sampling_params.max_tokens", "prompt and output are more than a decode instance's pool or max_total_kv_tokens can ever hold")
    if reason == "TOO_MANY_SAMPLES":
        return invalid_argument("sampling_params.n", "is more than any decode instance can run at once (max_num_seqs)")
    if reason in ("NO_DECODE", "NO_PREFILL"):
        return unavailable(reason, f"no {reason.removeprefix('NO_').lower()} instance is available", retry_after_s)
    text = "the queue is full" if reason == "QUEUE_FULL" else "the request waited longer than max_queue_time_s"
    return exhausted(reason, text, retry_after_s)
