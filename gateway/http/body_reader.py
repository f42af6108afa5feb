"""A request's body from the wire: bounded in size, in time, and in what all connections together may keep."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Receive

from gateway.http.errors import CLIENT_CLOSED, HttpError
from rpc.channels import MAX_MESSAGE_BYTES

_MAX_BODY_S: Final = 30.0
_MAX_BYTES_OF_ALL: Final = 8 * MAX_MESSAGE_BYTES
_RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Of one body and of all that are held at the same time."""

    max_bytes: int = MAX_MESSAGE_BYTES
    max_bytes_of_all: int = _MAX_BYTES_OF_ALL
    max_time_s: float = _MAX_BODY_S
    """From the headers to the body's last byte."""


class BodyReader:
    """On the event loop only."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._num_held_bytes = 0

    @property
    def num_held_bytes(self) -> int:
        """Of all bodies being read or parsed."""
        return self._num_held_bytes

    @contextmanager
    def holding(self) -> Iterator[HeldBody]:
        """A place for one body; its bytes count until the block is left."""
        body = HeldBody(bytearray())
        try:
            yield body
        finally:
            self._num_held_bytes -= len(body.content)

    async def read(self, headers: Headers, receive: Receive, into: HeldBody) -> None:
        """The whole body. Raises HttpError 413, 408, 429, and 499 when the client leaves. What is too large is not read to its end."""
        self._check_announced(headers)
        try:
            async with asyncio.timeout(self._limits.max_time_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise HttpError(CLIENT_CLOSED, "the client left")
                    self._add(message.get("body", b""), into)
                    more = message.get("more_body", False)
        except TimeoutError:
            headers_out = [("connection", "close")]
            raise HttpError(408, f"the body did not arrive within {self._limits.max_time_s:g} s", headers=headers_out) from None

    def _check_announced(self, headers: Headers) -> None:
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HttpError(415, f"Content-Encoding {encoding[:64]!r} is not supported; send the body as it is")
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > self._limits.max_bytes:
            raise self._too_large()

    def _add(self, piece: bytes, into: HeldBody) -> None:
        if len(into.content) + len(piece) > self._limits.max_bytes:
            raise self._too_large()
        if self._num_held_bytes + len(piece) > self._limits.max_bytes_of_all:
            raise HttpError(429, "too many large bodies at the same time", retry_after_s=_RETRY_AFTER_S)
        into.content.extend(piece)
        self._num_held_bytes += len(piece)

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is larger than {self._limits.max_bytes} bytes")


@dataclass(frozen=True, slots=True)
class HeldBody:
    """A body as far as it has come."""

    content: bytearray


def check_content_type(headers: Headers) -> None:
    """JSON, in UTF-8 and by that name, or unnamed. Raises HttpError 400."""
    given = headers.get("content-type")
    if given is None:
        return
    kind, *parameters = (part.strip().lower() for part in given.split(";"))
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpError(400, f"Content-Type must be application/json, is {given[:64]!r}")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8"):
            raise HttpError(400, f"Content-Type: charset must be utf-8, is {value[:64]!r}")
