"""Statuses as HTTP: the code, OpenAI's error JSON with vLLM's type names, and when to come back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import grpc

from gateway.http.field_names import openai_field, openai_message
from rpc.errors import StatusError

CLIENT_CLOSED: Final = 499
"""No status of HTTP's own; nobody receives it. It stands in metrics and spans for a client that left."""
_CODES: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: CLIENT_CLOSED,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 422: "UnprocessableEntityError", 500: "InternalServerError", 501: "NotImplementedError"}
_IMPOSSIBLE: Final = -9999.0
Headers = list[tuple[str, str]]


class HttpError(Exception):
    """An answer other than 200.

    param: the body's field. retry_after_s: when to come back; None says that it would not help. headers: beside those that say so.
    """

    def __init__(self, code: int, message: str, *, param: str | None = None, retry_after_s: float | None = None, headers: Headers | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers or []

    @classmethod
    def of(cls, error: StatusError) -> HttpError:
        """By the status table. INTERNAL and codes that no part of Tandem sends tell nothing of the inside."""
        code = _CODES.get(error.code, 500)
        if code == 500:
            return cls(code, "internal error")
        return cls(code, openai_message(error.message, error.field), param=openai_field(error.field) or None, retry_after_s=error.retry_after_s)

    def body(self) -> dict[str, Any]:
        """The error as JSON, the same in an answer and behind the first chunk of a stream."""
        return {"error": {"message": self.message, "type": type_name(self.code), "param": self.param, "code": self.code}}

    def all_headers(self) -> Headers:
        """OpenAI's client repeats 408, 409, 429 and 5xx by itself unless it is told whether that helps."""
        found = [*self.headers, ("x-should-retry", "false" if self.retry_after_s is None else "true")]
        if self.retry_after_s is not None:
            found += [("retry-after", str(max(1, math.ceil(self.retry_after_s)))), ("retry-after-ms", str(max(1, math.ceil(self.retry_after_s * 1000))))]
        return found


def let_go(error: BaseException | None) -> None:
    """For an error that was told: its frames keep the request, and through their variables and tasks the error, a cycle of up to a whole body that would stay
    until a full collection."""
    while error is not None:
        below = error.__context__
        error.__traceback__ = error.__context__ = error.__cause__ = None
        error = below


def type_name(code: int) -> str:
    """vLLM's name; where it has none, HTTP's phrase, as it does."""
    if code == CLIENT_CLOSED:
        return "Client Closed Request"
    return _TYPES.get(code) or HTTPStatus(code).phrase


def payload(content: Mapping[str, Any]) -> bytes:
    """JSON in UTF-8. The log probability of what cannot be, which JSON cannot say, is vLLM's -9999.0. Raises ValueError for NaN."""
    try:
        return _encoded(content)
    except ValueError:
        return _encoded(_sayable(content))


def _encoded(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _sayable(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _sayable(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_sayable(value) for value in content]
    return _IMPOSSIBLE if content == -math.inf else content
