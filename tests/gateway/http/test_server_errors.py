from __future__ import annotations

import json
import math

import grpc
import pytest

from gateway.http.errors import HttpError, payload, type_name
from rpc.errors import StatusError

Code = grpc.StatusCode
_TABLE = {
    Code.INVALID_ARGUMENT: (400, "BadRequestError"),
    Code.FAILED_PRECONDITION: (400, "BadRequestError"),
    Code.OUT_OF_RANGE: (400, "BadRequestError"),
    Code.UNAUTHENTICATED: (401, "Unauthorized"),
    Code.PERMISSION_DENIED: (403, "Forbidden"),
    Code.NOT_FOUND: (404, "NotFoundError"),
    Code.ALREADY_EXISTS: (409, "Conflict"),
    Code.RESOURCE_EXHAUSTED: (429, "Too Many Requests"),
    Code.CANCELLED: (499, "Client Closed Request"),
    Code.UNIMPLEMENTED: (501, "NotImplementedError"),
    Code.UNAVAILABLE: (503, "Service Unavailable"),
    Code.DEADLINE_EXCEEDED: (504, "Gateway Timeout"),
}


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_every_status_has_its_http_status_and_no_other_tells_of_the_inside(code: grpc.StatusCode) -> None:
    error = HttpError.of(StatusError(code, "words"))
    assert (error.code, type_name(error.code)) == _TABLE.get(code, (500, "InternalServerError"))
    assert error.body()["error"]["message"] == ("words" if code in _TABLE else "internal error")


@pytest.mark.parametrize(("seconds", "whole", "milliseconds"), [(0.0, "1", "1"), (0.0304, "1", "31"), (1.0, "1", "1000"), (1.001, "2", "1001")])
def test_when_to_come_back_is_never_at_once_and_never_too_early(seconds: float, whole: str, milliseconds: str) -> None:
    headers = dict(HttpError.of(StatusError(Code.UNAVAILABLE, "x", retry_after_s=seconds)).all_headers())
    assert headers == {"x-should-retry": "true", "retry-after": whole, "retry-after-ms": milliseconds}


def test_a_field_is_named_as_the_client_named_it() -> None:
    error = HttpError.of(StatusError(Code.INVALID_ARGUMENT, "sampling_params.top_p: must be a number", field="sampling_params.top_p"))
    assert (error.param, error.message) == ("top_p", "top_p: must be a number")


def test_an_answer_is_json_whatever_the_log_probabilities_are() -> None:
    assert json.loads(payload({"a": [-math.inf, {"b": -1.5}], "c": "é\u2028"})) == {"a": [-9999.0, {"b": -1.5}], "c": "é\u2028"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        payload({"a": math.nan})
