"""A received status, as both of gRPC's APIs tell it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

TRAILER_PREFIX: Final = "tandem-"
_DETAILS_KEY: Final = "grpc-status-details-bin"
_CUTS: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True)
class Failure:
    """A status other than OK."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    """ErrorInfo; empty when it is not the gateway that speaks, but the connection."""
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """ErrorInfo."""
    field: str = ""
    """BadRequest: the request's field."""
    retry_after_s: float | None = None
    """RetryInfo."""
    trailers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Without their prefix."""

    @property
    def is_cut(self) -> bool:
        """The connection broke, or could not be made: what a reset is told as, without a word of the gateway's, whose own INTERNAL has a reason."""
        return not self.reason and self.code in _CUTS

    @classmethod
    def of(cls, error: Any) -> Failure:
        """From a grpc.RpcError of a call that has ended; details that cannot be read are not there."""
        metadata = error.trailing_metadata() or ()
        raw = next((value for key, value in metadata if key == _DETAILS_KEY), None)
        details = _details(raw) if isinstance(raw, bytes) else {}
        return cls(error.code(), error.details() or "", trailers=tandem_trailers(metadata), **details)


def tandem_trailers(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """The gateway's own trailing metadata, its keys without their prefix."""
    return {key.removeprefix(TRAILER_PREFIX): value for key, value in metadata or () if key.startswith(TRAILER_PREFIX) and isinstance(value, str)}


def _details(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    info, bad_request, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    try:
        for detail in status_pb2.Status.FromString(raw).details:
            if detail.Unpack(info):
                found |= {"reason": info.reason, "metadata": dict(info.metadata)}
            elif detail.Unpack(bad_request) and bad_request.field_violations:
                found["field"] = bad_request.field_violations[0].field
            elif detail.Unpack(retry):
                found["retry_after_s"] = max(0.0, retry.retry_delay.ToNanoseconds() / 1e9)
    except DecodeError:
        return {}
    return found
