from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.door import strictly, wire_limits
from gateway.limits import RequestLimits
from gateway.served_model import ServedModel
from gateway.validation import check_request
from gateway.wire import WireLimits
from rpc.errors import StatusError
from tandem.v1 import gateway_pb2, generation_pb2
from tests.gateway.house import ask

Request, Unary = gateway_pb2.GenerateRequest, gateway_pb2.GenerateUnaryRequest


def varint(number: int) -> bytes:
    number %= 1 << 64
    low, rest = number & 0x7F, number >> 7
    return bytes((low,)) if not rest else bytes((low | 0x80,)) + varint(rest)


def record(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def refusal(raw: bytes, model: ServedModel, message: type[Message] = Request) -> StatusError:
    with pytest.raises(StatusError) as refused:
        strictly(message, wire_limits(model, RequestLimits()))(raw)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return refused.value


def test_a_request_of_every_field_passes(model: ServedModel) -> None:
    request = ask("x", request_id="r", priority=-3, echo=True, output_token_ids=[1, 2], temperature=0.5, top_k=-1, min_p=0.1, n=16, seed=2**64 - 1)
    request.sampling_params.MergeFrom(
        generation_pb2.SamplingParams(
            stop=["a"] * 16,
            logit_bias=dict.fromkeys(range(1024), 1.0),
            bad_words=["x"] * 128,
            bad_words_ids=[generation_pb2.TokenIds(ids=[1] * 64)] * 256,
            allowed_token_ids=range(419, -1, -1),
        )
    )
    parse = strictly(Request, wire_limits(model, RequestLimits()))
    assert parse(request.SerializeToString()) == request
    turns = [gateway_pb2.ChatMessage(role="user", content="x")] * 1024
    request.chat.messages.extend(turns)
    assert parse(request.SerializeToString()) == request
    assert strictly(Unary, wire_limits(model, RequestLimits()))(Unary(request=request).SerializeToString()).request == request


@settings(max_examples=200)
@given(raw=st.binary(max_size=60))
def test_bytes_that_pass_have_no_unknown_field(raw: bytes) -> None:
    limits = WireLimits(max_records=100)
    try:
        message = strictly(Request, limits)(raw)
    except (StatusError, DecodeError):
        return
    before = message.ByteSize()
    message.DiscardUnknownFields()
    assert message.ByteSize() == before


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (record(99, b"prefill-0"), "99"),
        (record(6, varint(60 << 3) + varint(1)), "sampling_params.60"),
        (record(5, record(1, record(7, b""))), "chat.messages.7"),
        (varint(10 << 3) + varint(1), "10"),
        (varint(3 << 3) + varint(1), "text"),
        (record(6, record(1, b"abcd")), "sampling_params.temperature"),
        (record(6, varint(12 << 3) + varint(2**32 + 1)), "sampling_params.n"),
        (record(6, varint(5 << 3) + varint(-1)), "sampling_params.max_tokens"),
        (varint(7 << 3) + varint(2**31), "priority"),
        (record(6, varint(3 << 3) + varint(-(2**31) - 1)), "sampling_params.top_k"),
        (record(4, record(1, varint(5) + varint(2**32 + 1) + varint(6))), "token_ids.ids"),
        (record(8, varint(2**32 + 1)), "output_token_ids"),
        (record(6, record(8, varint(2**32 + 1))), "sampling_params.stop_token_ids"),
        (record(6, record(22, record(1, varint(2**35)))), "sampling_params.bad_words_ids.ids"),
        (record(6, record(19, varint(1 << 3) + varint(2**32 + 5) + varint(2 << 3 | 5) + bytes(4))), "sampling_params.logit_bias.key"),
        (record(6, record(19, varint(1 << 3) + varint(5) + varint(9 << 3) + varint(1))), "sampling_params.logit_bias.9"),
    ],
)
def test_what_protobuf_would_keep_or_cut_is_refused_by_name(raw: bytes, field: str, model: ServedModel) -> None:
    assert refusal(raw, model).field == field
    assert refusal(record(1, raw), model, Unary).field == field
    Request.FromString(raw)


def test_a_text_that_is_no_utf8_is_named(model: ServedModel) -> None:
    for raw, field in (
        (record(3, b"ok \xff"), "text"),
        (record(5, record(1, record(2, b"\xed\xa0\x80"))), "chat.messages.content"),
        (record(6, record(7, b"\xc3")), "sampling_params.stop"),
    ):
        error = refusal(raw, model)
        assert (error.field, "is not UTF-8" in error.message) == (field, True)


MONSTERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty turns": (lambda: record(5, b"\x0a\x00" * 15_000_000), "chat.messages"),
    "empty stop strings": (lambda: record(6, b"\x3a\x00" * 15_000_000), "sampling_params"),
    "token ids": (lambda: record(4, record(1, b"\x01" * 30_000_000)), "token_ids"),
    "unknown fields": (lambda: (varint(900 << 3) + b"\x01") * 10_000_000, "900"),
    "text": (lambda: record(3, b"x" * 30_000_000), "text"),
    "allowed tokens": (lambda: record(6, record(20, b"\x01" * 30_000_000)), "sampling_params"),
}


@pytest.mark.parametrize("name", MONSTERS)
def test_a_monster_is_refused_before_it_costs_anything(name: str, model: ServedModel) -> None:
    make, field = MONSTERS[name]
    raw = make()
    tracemalloc.start()
    began = time.perf_counter()
    assert refusal(raw, model).field.startswith(field)
    took = time.perf_counter() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 0.5, "tracing slows it down twentyfold; untraced it is 10 ms at most"
    assert peak < 1_000_000


def test_the_door_lets_through_what_the_checks_refuse_in_better_words(model: ServedModel) -> None:
    parse = strictly(Request, wire_limits(model, RequestLimits()))
    for request, field in (
        (ask("x" * (512 * model.longest_token_chars + 1)), "text"),
        (ask(token_ids=generation_pb2.TokenIds(ids=[1] * 513)), "token_ids.ids"),
        (ask("x", stop=["s"] * 300), "sampling_params.stop"),
        (ask("x", stop_token_ids=[1] * 1000), "sampling_params.stop_token_ids"),
        (ask(chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user")] * 1025)), "chat.messages"),
    ):
        with pytest.raises(StatusError) as refused:
            check_request(parse(request.SerializeToString()), model, RequestLimits())
        assert refused.value.field == field


def test_cut_bytes_are_no_message(model: ServedModel) -> None:
    whole = ask("hello", temperature=0.5).SerializeToString()
    for length in range(1, len(whole)):
        try:
            parsed = strictly(Request, wire_limits(model, RequestLimits()))(whole[:length])
        except DecodeError:
            continue
        assert whole.startswith(parsed.SerializeToString())
