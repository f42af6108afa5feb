"""One row of a table of bad input, how it is sent byte for byte, and what came back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from gateway.limits import RequestLimits
from rpc.channels import CONTROL_OPTIONS
from rpc.errors import StatusError
from tandem.v1 import kv_pb2

GENERATE = "/tandem.v1.GatewayService/Generate"
GENERATE_UNARY = "/tandem.v1.GatewayService/GenerateUnary"
DECODE_GENERATE = "/tandem.v1.DecodeService/Generate"
PAIR = "/tandem.v1.PrefillService/Pair"
PREFILL = "/tandem.v1.PrefillService/Prefill"
READ_KV = "/tandem.v1.PrefillService/ReadKv"
WRITE_KV = "/tandem.v1.PrefillService/WriteKv"
MAX_LATENCY_S = 0.010
"""Median time in which a light row is refused."""

Code = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class Facts:
    """What rows must know of the services that they are sent to."""

    model: str
    vocab_size: int
    max_model_len: int
    longest_token_chars: int = 64
    layout: kv_pb2.KvLayout = field(default_factory=kv_pb2.KvLayout)
    """That of the workers' pools."""
    pairing_id: str = ""
    """A pairing with the prefill worker that lasts, and was offered `inline` alone."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    control_tokens: Mapping[str, int] = field(default_factory=dict)
    """Special tokens by their text, which in what a user says is nothing but text."""


Make = Callable[[Facts], bytes]


@dataclass(frozen=True, slots=True)
class BadInput:
    """A request that must be refused, in bytes, and how."""

    name: str
    about: str
    """The field of the contract that is wrong, as a path from the request; empty when it is the message as a whole."""
    make: Make
    code: Code = Code.INVALID_ARGUMENT
    field: str | None = ""
    """What BadRequest names; None: the row does not say."""
    reason: str | None = "INVALID_ARGUMENT"
    """ErrorInfo's; None: the status comes from gRPC itself."""
    path: str = GENERATE
    timeout_s: float = 20.0
    light: bool = True
    """False: the bytes themselves take longer to travel, or the text to tokenize, than a refusal may take."""
    meanwhile: Make | None = None
    """A request that is in flight while this one is refused."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a row ended."""

    code: Code
    field: str = ""
    reason: str = ""
    message: str = ""
    latency_s: float = 0.0

    def difference(self, row: BadInput) -> str:
        """What is not as the row says; empty when all is."""
        wrong = [f"{self.code.name} for {row.code.name}"] if self.code is not row.code else []
        if row.field is not None and self.field != row.field:
            wrong.append(f"field {self.field!r} for {row.field!r}")
        if row.reason is not None and self.reason != row.reason:
            wrong.append(f"reason {self.reason!r} for {row.reason!r}")
        return f"{', '.join(wrong)}: {self.message[:200]}" if wrong else ""


def raw_channel(target: str) -> grpc.aio.Channel:
    """A channel that sends messages of any size."""
    options = tuple(option for option in CONTROL_OPTIONS if option[0] != "grpc.max_send_message_length")
    return grpc.aio.insecure_channel(target, options=(*options, ("grpc.max_send_message_length", -1)))


async def send(channel: Any, row: BadInput, request: bytes) -> Refusal:
    """Sends a row's bytes, made before, and waits for the end; OK is a result like any other."""
    started_s = time.monotonic()
    try:
        await _run(channel, row.path, request, row.timeout_s)
    except grpc.aio.AioRpcError as error:
        status = StatusError.of(error)
        return Refusal(status.code, status.field, status.reason, status.message, time.monotonic() - started_s)
    return Refusal(Code.OK, latency_s=time.monotonic() - started_s)


async def _run(channel: Any, path: str, request: bytes, timeout_s: float) -> None:
    """Reads to the end. Without serializers: bytes go out and come in as they are."""
    if path in (GENERATE_UNARY, WRITE_KV):
        await channel.unary_unary(path)(request, timeout=timeout_s)
        return
    in_stream = path in (PAIR, PREFILL)
    call = channel.stream_stream(path)(iter((request,)), timeout=timeout_s) if in_stream else channel.unary_stream(path)(request, timeout=timeout_s)
    try:
        async for _ in call:
            pass
    finally:
        call.cancel()


@asynccontextmanager
async def in_flight(channel: Any, row: BadInput, facts: Facts) -> AsyncIterator[None]:
    """The row's other request, from its first message to the end of the block."""
    if row.meanwhile is None:
        yield
        return
    call = channel.unary_stream(GENERATE)(row.meanwhile(facts), timeout=row.timeout_s)
    try:
        if not isinstance(await call.read(), bytes):
            raise RuntimeError(f"{row.name}: the other request has ended")
        yield
    finally:
        call.cancel()


def varint(value: int) -> bytes:
    """Base 128, least significant group first; a negative number is sent as 64 bits, as a careless client does."""
    value &= (1 << 64) - 1
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes((*groups, value))


def varint_field(number: int, value: int) -> bytes:
    """A scalar field as it goes over the wire."""
    return varint(number << 3) + varint(value)


def bytes_field(number: int, payload: bytes) -> bytes:
    """A string, bytes, message or packed field as it goes over the wire."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def fixed64_field(number: int) -> bytes:
    """A field of a wire type that no field of the contract has: parsers take it for one that they do not know."""
    return varint(number << 3 | 1) + bytes(8)


def leaf_paths(descriptor: Any, prefix: str = "") -> Sequence[str]:
    """Paths of all fields of a message that hold a value, nested ones included."""
    found: list[str] = []
    for each in descriptor.fields:
        path = f"{prefix}{each.name}"
        nested = each.message_type
        found += [path] if nested is None or nested.GetOptions().map_entry else leaf_paths(nested, f"{path}.")
    return found
