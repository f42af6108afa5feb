"""gRPC statuses with google.rpc details, in both directions.

A handler raises StatusError; the server interceptor sends it. A caller turns what it received back with StatusError.of and may raise it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

DOMAIN: Final = "tandem"
TRAILER_PREFIX: Final = "tandem-"
_DETAILS_KEY: Final = "grpc-status-details-bin"
# The text travels three times, percent-encoded (three bytes for one) and twice in base64, and a peer accepts 8 KiB of metadata by default.
_MAX_MESSAGE_BYTES: Final = 1024


class StartupError(Exception):
    """The service cannot start, for a reason that the operator can mend: told in one line, without a traceback."""


class StatusError(Exception):
    """An RPC's status other than OK.

    reason: ErrorInfo.reason, in domain "tandem". field: BadRequest, the request's field. retry_after_s: RetryInfo. quota_subject: QuotaFailure.
    metadata: ErrorInfo.metadata. trailers: trailing metadata, keys starting with "tandem-".
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        trailers: Mapping[str, str] | None = None,
        quota_subject: str = "",
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata: dict[str, str] = dict(metadata or {})
        self.trailers: dict[str, str] = dict(trailers or {})
        self.quota_subject = quota_subject

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Self:
        """Reads a received status with its details; trailers that start with "tandem-" are kept, details of another kind are not."""
        found: dict[str, Any] = {}
        trailers: dict[str, str] = {}
        for key, value in error.trailing_metadata() or ():
            if key == _DETAILS_KEY and isinstance(value, bytes):
                found = _parse_details(value)
            elif key.startswith(TRAILER_PREFIX) and isinstance(value, str):
                trailers[key] = value
        return cls(error.code(), error.details() or "", trailers=trailers, **found)

    def to_status(self, trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()) -> SentStatus:
        """The status for `context.abort_with_status`; `trailing_metadata` is what the handler had set before and is kept."""
        message = self.message.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
        code = self.code.value[0]
        status = status_pb2.Status(code=code, message=message, details=[_packed(detail) for detail in self._details(message)])
        trailers = tuple((key, value.encode("ascii", "replace").decode()) for key, value in self.trailers.items())
        return SentStatus(self.code, message, (*trailing_metadata, *trailers, (_DETAILS_KEY, status.SerializeToString())))

    def _details(self, message: str) -> list[Any]:
        details: list[Any] = []
        if self.reason or self.metadata:
            details.append(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata))
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=message)
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        if self.quota_subject:
            quota = error_details_pb2.QuotaFailure.Violation(subject=self.quota_subject, description=message)
            details.append(error_details_pb2.QuotaFailure(violations=[quota]))
        return details


class SentStatus(grpc.Status):
    """A status ready to be sent."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self.code = code
        self.details = details
        self.trailing_metadata = trailing_metadata


def _packed(detail: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _parse_details(raw: bytes) -> dict[str, Any]:
    """The keyword arguments of StatusError that the details stand for; what cannot be parsed is not there."""
    try:
        return _read_details(status_pb2.Status.FromString(raw))
    except DecodeError:
        return {}


def _read_details(status: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    info, bad_request, retry, quota = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.QuotaFailure(),
    )
    for detail in status.details:
        if detail.Unpack(info):
            found |= {"reason": info.reason, "metadata": dict(info.metadata)}
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            found["field"] = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            found["retry_after_s"] = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(quota) and quota.violations:
            found["quota_subject"] = quota.violations[0].subject
    return found


def invalid_argument(field: str, description: str) -> StatusError:
    """INVALID_ARGUMENT that names the request's field."""
    return StatusError(grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {description}", reason="INVALID_ARGUMENT", field=field)


def not_found(reason: str, message: str) -> StatusError:
    """NOT_FOUND, such as MODEL_NOT_FOUND."""
    return StatusError(grpc.StatusCode.NOT_FOUND, message, reason=reason)


def already_exists(message: str) -> StatusError:
    """ALREADY_EXISTS: the request id is in flight."""
    return StatusError(grpc.StatusCode.ALREADY_EXISTS, message, reason="ALREADY_EXISTS")


def exhausted(reason: str, message: str, retry_after_s: float | None, *, quota_subject: str = "") -> StatusError:
    """RESOURCE_EXHAUSTED: the same place, later."""
    return StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason=reason, retry_after_s=retry_after_s, quota_subject=quota_subject or reason)


def unavailable(reason: str, message: str, retry_after_s: float | None = None) -> StatusError:
    """UNAVAILABLE: try elsewhere."""
    return StatusError(grpc.StatusCode.UNAVAILABLE, message, reason=reason, retry_after_s=retry_after_s)


def failed_precondition(message: str, differences: Mapping[str, str], *, reason: str = "LAYOUT_MISMATCH") -> StatusError:
    """FAILED_PRECONDITION; `differences` says for each thing that differs what both sides have."""
    return StatusError(grpc.StatusCode.FAILED_PRECONDITION, message, reason=reason, metadata=differences)


def deadline_exceeded(phase: str) -> StatusError:
    """DEADLINE_EXCEEDED in a phase of the request."""
    message = f"the deadline passed in phase {phase}"
    return StatusError(grpc.StatusCode.DEADLINE_EXCEEDED, message, reason="DEADLINE_EXCEEDED", metadata={"phase": phase})


def aborted(reason: str, message: str) -> StatusError:
    """ABORTED, such as a broken hold."""
    return StatusError(grpc.StatusCode.ABORTED, message, reason=reason)


def internal(message: str = "internal error") -> StatusError:
    """INTERNAL: our bug or a device error. The message holds nothing of the inside; the log does."""
    return StatusError(grpc.StatusCode.INTERNAL, message, reason="INTERNAL")
