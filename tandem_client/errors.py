"""What can go wrong, one class for each thing that a caller may want to do about it.

TandemError
    InvalidRequest      a parameter is wrong: `field` names it
    ModelNotFound       the model is not served
    AlreadyInFlight     the request id is in use
    Unauthenticated     no API key, or one that is not known
    PermissionDenied    the key may not do this
    Overloaded          the same place, later: `retry_after_s`
    Unavailable         the gateway or a pool is gone, drains, or was lost in mid-stream: try again, or elsewhere
    DeadlineExceeded    `timeout_s` has passed, in `phase`
    Cancelled           `cancel()`, or leaving a stream
    Unsupported         the gateway does not know the call
    Internal            a bug or a device error on the other side, or an answer that cannot be
"""

from __future__ import annotations

from typing import Self

import grpc

from tandem_client.failure import Failure


class TandemError(Exception):
    """A call that did not end well."""

    def __init__(self, failure: Failure, request_id: str = "", tokens_sent: int = 0) -> None:
        super().__init__(failure, request_id, tokens_sent)
        self.failure = failure
        """The status as it was received."""
        self.request_id = request_id
        """As the caller named it, or as the client drew it; empty for a call that is no request."""
        self.tokens_sent = tokens_sent
        """Tokens that have reached the client, of all attempts and samples."""

    def __str__(self) -> str:
        named = f" {self.reason}" if self.reason and self.reason != self.code.name else ""
        sent = f" (after {self.tokens_sent} tokens)" if self.tokens_sent else ""
        return f"{self.code.name}{named}: {self.message}{sent}"

    @property
    def code(self) -> grpc.StatusCode:
        """Of the status."""
        return self.failure.code

    @property
    def reason(self) -> str:
        """The gateway's word for it, such as QUEUE_FULL; empty when it is the connection that failed."""
        return self.failure.reason

    @property
    def message(self) -> str:
        """For people."""
        return self.failure.message

    @classmethod
    def of(cls, failure: Failure, request_id: str = "", tokens_sent: int = 0) -> TandemError:
        """The error of the class that the status calls for."""
        return _CLASSES.get(failure.code, Internal)(failure, request_id, tokens_sent)


class InvalidRequest(TandemError):
    """INVALID_ARGUMENT, or FAILED_PRECONDITION."""

    @property
    def field(self) -> str:
        """The request's field, with its full name."""
        return self.failure.field


class ModelNotFound(TandemError):
    """NOT_FOUND."""


class AlreadyInFlight(TandemError):
    """ALREADY_EXISTS: a request of this id runs."""


class Unauthenticated(TandemError):
    """UNAUTHENTICATED."""


class PermissionDenied(TandemError):
    """PERMISSION_DENIED."""


class Overloaded(TandemError):
    """RESOURCE_EXHAUSTED: QUEUE_FULL, QUEUE_TIMEOUT or TENANT_QUOTA."""

    @property
    def retry_after_s(self) -> float | None:
        """When to come back, from the gateway's measured pace."""
        return self.failure.retry_after_s


class Unavailable(TandemError):
    """UNAVAILABLE: NO_DECODE, NO_PREFILL, DRAINING, HANDOVER_FAILED, DECODE_LOST; no reason: the connection failed. Also any cut that was not resumed."""

    @property
    def retry_after_s(self) -> float | None:
        """When to come back, where the gateway said so."""
        return self.failure.retry_after_s


class DeadlineExceeded(TandemError):
    """DEADLINE_EXCEEDED."""

    @property
    def phase(self) -> str:
        """Where the request was. In the gateway's words when it could tell: validate, tokenize, queue, route, prefill, decode. In the client's when its own
        clock was first: first_token (none had come) or decode."""
        return self.failure.metadata.get("phase", "")


class Cancelled(TandemError):
    """CANCELLED."""

    @classmethod
    def here(cls, request_id: str = "", tokens_sent: int = 0) -> Self:
        """By this side."""
        return cls(Failure(grpc.StatusCode.CANCELLED, "the call was cancelled by its caller"), request_id, tokens_sent)


class Unsupported(TandemError):
    """UNIMPLEMENTED."""


class Internal(TandemError):
    """INTERNAL, UNKNOWN, DATA_LOSS and ABORTED."""


_CLASSES: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyInFlight,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
}
