"""The wire format of ReadKv: true protobuf, and nothing but the due chunk is accepted."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from kvtransfer.chunks import MAX_CHUNK_BYTES, RunCheck, pack_chunk
from kvtransfer.errors import ChunkError
from tandem.v1 import prefill_pb2

RUN = bytes(range(200))


def _messages() -> list[bytes]:
    """A run of 2 blocks from block 3 on, in chunks of 80, 80 and 40 bytes, each of two parts."""
    cuts = [(start, min(start + 80, 200)) for start in range(0, 200, 80)]
    view = memoryview(RUN)
    return [pack_chunk(3, 2, a, [view[a : a + 10], view[a + 10 : b]], last=b == 200) for a, b in cuts]


def _accept(messages: list[bytes]) -> bytes:
    check = RunCheck(3, 2, 200)
    out = bytearray(200)
    for message in messages:
        offset, payload = check.accept(message)
        out[offset : offset + len(payload)] = payload
    check.finish()
    return bytes(out)


def test_a_message_is_a_true_read_kv_response() -> None:
    message = _messages()[1]
    chunk = prefill_pb2.ReadKvResponse.FromString(message).chunk
    assert prefill_pb2.ReadKvResponse(chunk=chunk).SerializeToString() == message
    assert struct.unpack_from("<IIQII", chunk) == (3, 2, 80, 80, 0)
    assert chunk[24:] == RUN[80:160]


@pytest.mark.parametrize("num_bytes", [1, 103, 104, 127, 128, 16_359, 16_360, MAX_CHUNK_BYTES])
def test_every_length_goes_there_and_back(num_bytes: int) -> None:
    payload = np.arange(num_bytes, dtype=np.uint8)
    message = pack_chunk(0, 1, 0, [memoryview(payload.tobytes())], last=True)
    assert prefill_pb2.ReadKvResponse.FromString(message).chunk[24:] == payload.tobytes()
    _, got = RunCheck(0, 1, num_bytes).accept(message)
    assert got == payload.tobytes()


def test_a_whole_run_is_accepted() -> None:
    assert _accept(_messages()) == RUN


def _swap(messages: list[bytes]) -> list[bytes]:
    return [messages[1], messages[0], messages[2]]


def _relabel_last(messages: list[bytes]) -> list[bytes]:
    return [messages[0], messages[1], pack_chunk(3, 2, 160, [memoryview(RUN)[160:200]], last=False)]


FAULTS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "reordered": _swap,
    "twice": lambda m: [m[0], m[0], m[1], m[2]],
    "one missing": lambda m: [m[0], m[2]],
    "cut at the end": lambda m: m[:2],
    "one too many": lambda m: [*m, m[2]],
    "truncated": lambda m: [m[0][:-1], *m[1:]],
    "longer": lambda m: [m[0] + b"x", *m[1:]],
    "empty": lambda m: [b"", *m],
    "another field": lambda m: [b"\x12" + m[0][1:], *m[1:]],
    "endless varint": lambda m: [b"\x0a" + b"\xff" * 20, *m[1:]],
    "header only": lambda m: [b"\x0a\x05abcde", *m[1:]],
    "no payload": lambda m: [pack_chunk(3, 2, 0, [], last=False), *m],
    "another run": lambda m: [pack_chunk(4, 2, 0, [memoryview(RUN)[:80]], last=False), *m[1:]],
    "last not marked": _relabel_last,
    "last too early": lambda m: [pack_chunk(3, 2, 0, [memoryview(RUN)[:80]], last=True)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_any_other_sequence_of_chunks_is_refused(fault: str) -> None:
    with pytest.raises(ChunkError):
        _accept(FAULTS[fault](_messages()))


def test_every_flipped_bit_of_what_is_around_the_payload_is_detected() -> None:
    messages = _messages()
    for index in range(len(messages[1]) - 80):
        for bit in range(8):
            broken = bytearray(messages[1])
            broken[index] ^= 1 << bit
            with pytest.raises(ChunkError):
                _accept([messages[0], bytes(broken), messages[2]])
