"""Bodies that are made to cost much: the work for each grows no faster than its size."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from gateway.http.json_body import read_body
from rpc.errors import StatusError

_MANY = 40_000


def test_a_name_said_twice_behind_many_others_is_found_in_one_pass() -> None:
    names = [f'"k{number}":0' for number in range(_MANY)]
    began = time.process_time()
    with pytest.raises(StatusError, match=f'says "k{_MANY - 1}" twice'):
        read_body(f"{{{','.join([*names, names[-1]])}}}".encode())
    assert time.process_time() - began < 5  # each against each other takes half a minute


def test_an_unknown_name_of_a_mebibyte_costs_no_more_than_its_own_length() -> None:
    body = read_body(b'{"' + b"ab" * (1 << 19) + b'":1}')
    body.flag("stream")
    tracemalloc.start()
    try:
        with pytest.raises(StatusError, match="is no field of this request"):
            body.end()
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()
