"""A look at a request's bytes before protobuf makes anything of them.

protobuf keeps fields that it does not know, cuts numbers that are too large for their field, and makes objects of some 50 bytes from messages of two: 30 MB
of empty messages took 1.2 s on the event loop and 500 MB. So the bytes are walked first, record by record and not byte by byte: what is no field of
the message is refused by its number, and a request of too many records, or of a text that no context could hold, before it has cost anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from rpc.errors import invalid_argument

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}
_WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
    FieldDescriptor.TYPE_MESSAGE: _LENGTH,
}
"""Of the kinds that requests use; all others are varints."""
_MAX_VARINT_BYTES = 10
_LONGEST_ID_BYTES = 4
"""Of a packed number: all of them are token ids, and no vocabulary is of 2^28."""
_GOES_ON = bytes(byte >> 7 for byte in range(256))
"""Marks the bytes of varints behind which another one comes."""
_WRAPPER = "request"
"""The field by which a request message of its own wraps a GenerateRequest: no part of the names of what is in it."""


class CutShortError(Exception):
    """The bytes are no message at all; protobuf says so too."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What a message may hold."""

    max_records: int
    """Fields in all, each element of a repeated field counted, but for packed numbers; an entry of a map is three."""
    max_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of a field by its path, all elements together."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    wire_types: tuple[int, ...]
    message: Descriptor | None
    is_text: bool
    num_bits: int
    """Of a number in a varint."""
    signed: bool


@cache
def _fields_of(descriptor: Descriptor) -> dict[int, _Field]:
    return {each.number: _field_of(each) for each in descriptor.fields}


def _field_of(each: FieldDescriptor) -> _Field:
    natural = _WIRE_TYPES.get(each.type, _VARINT)
    return _Field(
        each.name,
        (natural, _LENGTH) if each.is_repeated else (natural,),  # numbers of a repeated field may come packed
        each.message_type,
        each.type == FieldDescriptor.TYPE_STRING,
        32 if each.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT32) else 64,
        each.type == FieldDescriptor.TYPE_INT32,
    )


@dataclass(slots=True)
class _Walk:
    raw: bytes
    limits: WireLimits
    look_at_text: bool
    num_records: int = 0
    num_bytes: dict[str, int] = field(default_factory=dict)

    def message(self, descriptor: Descriptor, position: int, end: int, prefix: str) -> None:
        fields = _fields_of(descriptor)
        while position < end:
            tag, position = self._varint(position, end)
            number, wire_type = tag >> 3, tag & 7
            each = fields.get(number)
            if each is None:
                raise invalid_argument(f"{prefix}{number}", f"is no field of {descriptor.name}")
            path = f"{prefix}{each.name}"
            if wire_type not in each.wire_types:
                raise invalid_argument(path, f"comes as wire type {wire_type}")
            self._count(path)
            position = self._value(each, wire_type, position, end, path)

    def _count(self, path: str) -> None:
        self.num_records += 1
        if self.num_records > self.limits.max_records:
            raise invalid_argument(path, f"is one of more than {self.limits.max_records} fields and elements")

    def _value(self, each: _Field, wire_type: int, position: int, end: int, path: str) -> int:
        """Returns where the value ends."""
        if wire_type == _VARINT:
            value, position = self._varint(position, end)
            if not _fits(value, each):
                raise invalid_argument(path, f"is no number of {each.num_bits} bits")
            return position
        if wire_type != _LENGTH:
            return position + _FIXED_SIZES[wire_type]
        length, position = self._varint(position, end)
        if length > end - position:
            raise CutShortError
        self._bytes(path, length)
        if each.message is not None:
            self.message(each.message, position, position + length, "" if path == _WRAPPER else f"{path}.")
        elif each.is_text:
            if self.look_at_text:
                _check_utf8(self.raw[position : position + length], path)
        elif _VARINT in each.wire_types:
            _check_packed(self.raw[position : position + length], path)
        return position + length

    def _bytes(self, path: str, length: int) -> None:
        limit = self.limits.max_bytes.get(path)
        if limit is not None:
            self.num_bytes[path] = total = self.num_bytes.get(path, 0) + length
            if total > limit:
                raise invalid_argument(path, f"is at least {total} bytes, and no more than {limit} can be of use")

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        if position < end and self.raw[position] < 0x80:
            return self.raw[position], position + 1
        value = 0
        for index in range(min(_MAX_VARINT_BYTES, end - position)):
            byte = self.raw[position + index]
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return value, position + index + 1
        raise CutShortError


def _fits(value: int, each: _Field) -> bool:
    if each.signed:  # a negative number comes as 64 bits
        half = 1 << (each.num_bits - 1)
        return value < half or (1 << 64) - half <= value < 1 << 64
    return value < 1 << each.num_bits


def _check_packed(numbers: bytes, path: str) -> None:
    """By means that look at all of them at once: there may be as many as the vocabulary has tokens."""
    if numbers.translate(_GOES_ON).find(b"\1" * _LONGEST_ID_BYTES) >= 0:
        raise invalid_argument(path, f"holds a number of more than {7 * _LONGEST_ID_BYTES} bits, which is no token id")


def _check_utf8(text: bytes, path: str) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise invalid_argument(path, f"is not UTF-8: {error.reason} at byte {error.start}") from None


def check_wire(raw: bytes, message: type[Message], limits: WireLimits, *, look_at_text: bool = False) -> None:
    """Raises StatusError that names the field, CutShortError for bytes that are no message. Cost: O(records), at most `max_records`.

    `look_at_text` decodes each string too: for bytes that protobuf has refused, as it does not say which field is no UTF-8.
    """
    _Walk(raw, limits, look_at_text).message(cast(Descriptor, message.DESCRIPTOR), 0, len(raw), "")
