from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from rpc import errors
from rpc.errors import StatusError
from tests.rpc.peers import serving

EVERY_DETAIL = StatusError(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "the queue is full",
    reason="QUEUE_FULL",
    field="sampling_params.n",
    retry_after_s=1.25,
    metadata={"depth": "7"},
    trailers={"tandem-tokens-sent": "12"},
    quota_subject="tenant:acme",
)


async def _received(error: StatusError) -> grpc.aio.AioRpcError:
    async def refuse(_request: bytes, _context: Any) -> bytes:
        raise error

    async with serving(UnaryUnary=refuse) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.call("UnaryUnary", b"", timeout=5)
        return caught.value


async def test_status_error_survives_the_wire_with_every_detail() -> None:
    back = StatusError.of(await _received(EVERY_DETAIL))

    for attribute in ("code", "message", "reason", "field", "retry_after_s", "metadata", "trailers", "quota_subject"):
        assert getattr(back, attribute) == getattr(EVERY_DETAIL, attribute), attribute


async def test_details_are_google_rpc_messages_in_domain_tandem() -> None:
    received = await _received(EVERY_DETAIL)
    raw = dict(received.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(raw)
    info = error_details_pb2.ErrorInfo()

    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] and status.message == "the queue is full"
    assert status.details[0].Unpack(info) and (info.domain, info.reason) == ("tandem", "QUEUE_FULL")
    assert [detail.type_url.rpartition(".")[2] for detail in status.details] == ["ErrorInfo", "BadRequest", "RetryInfo", "QuotaFailure"]


async def test_status_without_details_is_read_too() -> None:
    async def refuse(_request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.NOT_FOUND, "nothing here", (("tandem-path", "local"), ("other", "x")))
        return b""

    async with serving(UnaryUnary=refuse) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.call("UnaryUnary", b"", timeout=5)
    back = StatusError.of(caught.value)

    assert (back.code, back.message, back.reason, back.retry_after_s) == (grpc.StatusCode.NOT_FOUND, "nothing here", "", None)
    assert back.trailers == {"tandem-path": "local"}


async def test_malformed_details_are_ignored() -> None:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    received = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), metadata, details="broken")

    assert StatusError.of(received).message == "broken"


async def test_details_of_a_malformed_kind_are_ignored() -> None:
    status = status_pb2.Status(details=[any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff\xff")])
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    received = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), metadata, details="broken")

    assert StatusError.of(received).message == "broken"


@pytest.mark.parametrize("character", ["x", "\U0001f600", "\udcff"])
async def test_long_message_is_cut_so_that_the_trailers_fit(character: str) -> None:
    received = await _received(errors.invalid_argument("text", character * 100_000))

    assert received.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert StatusError.of(received).field == "text"


async def test_trailing_metadata_of_the_handler_is_kept() -> None:
    async def refuse(_request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("tandem-request-id", "r1"),))
        raise errors.unavailable("NO_DECODE", "no decode instance", 2.0)

    async with serving(UnaryUnary=refuse) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.call("UnaryUnary", b"", timeout=5)
    back = StatusError.of(caught.value)

    assert (back.reason, back.retry_after_s, back.trailers) == ("NO_DECODE", 2.0, {"tandem-request-id": "r1"})


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (errors.invalid_argument("n", "too large"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (errors.not_found("MODEL_NOT_FOUND", "no such model"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
        (errors.already_exists("in flight"), grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS"),
        (errors.exhausted("QUEUE_FULL", "full", 1.0), grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        (errors.unavailable("DRAINING", "draining", 1.0), grpc.StatusCode.UNAVAILABLE, "DRAINING"),
        (errors.failed_precondition("layouts differ", {"dtype": "float32, bfloat16"}), grpc.StatusCode.FAILED_PRECONDITION, "LAYOUT_MISMATCH"),
        (errors.deadline_exceeded("queue"), grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
        (errors.aborted("HOLD_BROKEN", "broken"), grpc.StatusCode.ABORTED, "HOLD_BROKEN"),
        (errors.internal(), grpc.StatusCode.INTERNAL, "INTERNAL"),
    ],
)
def test_constructors_give_the_code_and_reason_of_the_status_table(error: StatusError, code: grpc.StatusCode, reason: str) -> None:
    assert (error.code, error.reason) == (code, reason)
