"""The messages of ReadKv: each is a true ReadKvResponse on the wire, made and read without protobuf's own copies of the payload.

`0x0a`, the length as a varint, then the chunk: a 24-byte header (little endian: u32 first block, u32 blocks, u64 offset in the run, u32 bytes,
u32 flags) and the payload.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.errors import ChunkError

MAX_CHUNK_BYTES = 1 << 20
_HEADER = struct.Struct("<IIQII")
_FIELD_1_BYTES = 0x0A
_LAST = 1
_MAX_VARINT_BYTES = 5


def pack_chunk(first_block: int, num_blocks: int, offset: int, parts: Sequence[memoryview], *, last: bool) -> bytes:
    """One message with the payload `parts`, joined in the one copy that gRPC makes unavoidable."""
    num_bytes = sum(len(part) for part in parts)
    header = _HEADER.pack(first_block, num_blocks, offset, num_bytes, _LAST * last)
    return b"".join((bytes((_FIELD_1_BYTES,)), _varint(_HEADER.size + num_bytes), header, *parts))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _unpack(message: bytes) -> tuple[int, tuple[int, int, int, int, int]]:
    """Where the payload begins, and the header's fields. Raises ChunkError for anything but exactly one whole chunk."""
    if not message or message[0] != _FIELD_1_BYTES:
        raise ChunkError("the message does not begin with a chunk")
    length = shift = 0
    for start in range(1, min(len(message), 1 + _MAX_VARINT_BYTES)):
        length |= (message[start] & 0x7F) << shift
        shift += 7
        if message[start] < 0x80:
            break
    else:
        raise ChunkError("the chunk's length has no end")
    start += 1
    if length != len(message) - start or length < _HEADER.size:
        raise ChunkError(f"the chunk says {length} bytes, {len(message) - start} came")
    return start + _HEADER.size, _HEADER.unpack_from(message, start)


@dataclass(slots=True)
class RunCheck:
    """Accepts the chunks of one run in order, exactly once and to the last byte."""

    first_block: int
    num_blocks: int
    num_bytes: int
    num_received: int = 0
    ended: bool = False

    def accept(self, message: bytes) -> tuple[int, memoryview]:
        """The next payload and its offset in the run. Raises ChunkError for any chunk but the one that is due."""
        start, (first_block, num_blocks, offset, length, flags) = _unpack(message)
        payload = memoryview(message)[start:]
        if (first_block, num_blocks) != (self.first_block, self.num_blocks):
            raise ChunkError(f"a chunk of blocks {first_block}+{num_blocks} in the run {self.first_block}+{self.num_blocks}")
        if self.ended or offset != self.num_received or length != len(payload) or not 0 < length <= self.num_bytes - self.num_received:
            raise ChunkError(f"{length} bytes at {offset}, {self.num_received} of {self.num_bytes} came before")
        if flags & ~_LAST:
            raise ChunkError(f"unknown flags {flags:#x}")
        self.num_received += length
        self.ended = bool(flags & _LAST)
        if self.ended != (self.num_received == self.num_bytes):
            raise ChunkError(f"{self.num_received} of {self.num_bytes} bytes came, but the chunk is {'' if self.ended else 'not '}marked as the last")
        return offset, payload

    def finish(self) -> None:
        """Raises ChunkError when the stream ended before the last chunk."""
        if not self.ended:
            raise ChunkError(f"the stream ended after {self.num_received} of {self.num_bytes} bytes")
