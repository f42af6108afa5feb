"""Bodies that cost a parser far more than their size, and the count that refuses them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http import json_parts
from gateway.http.completion_request import completion_request
from gateway.http.json_body import MAX_IDS, read_body
from gateway.http.json_parts import MAX_PARTS, check_parts
from gateway.limits import RequestLimits
from gateway.served_model import ServedModel
from rpc.errors import StatusError

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\[{é\n'), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.sampled_from('b"\\]'), max_size=4), inner, max_size=4),
    max_leaves=20,
)


def _num_parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_num_parts, value.values()))
    return 1 + sum(map(_num_parts, value)) if isinstance(value, list) else int(isinstance(value, str))


@settings(max_examples=500, deadline=None)
@given(value=_JSON, window=st.integers(1, 9), indent=st.sampled_from((None, 1)), ascii_only=st.booleans())
def test_the_count_is_the_parsers_wherever_the_windows_cut(value: object, window: int, indent: int | None, ascii_only: bool) -> None:
    raw, expected = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode(), _num_parts(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_parts, "_WINDOW_BYTES", window)
        check_parts(raw, expected)
        if expected:
            with pytest.raises(StatusError, match=f"body: has more than {expected - 1} strings, lists and objects"):
                check_parts(raw, expected - 1)


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=30) | st.text(st.sampled_from('"\\[{a'), max_size=30).map(str.encode), window=st.integers(1, 5))
def test_any_bytes_are_counted_to_their_end(raw: bytes, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_parts, "_WINDOW_BYTES", window)
        check_parts(raw)


def test_the_largest_conversation_has_fewer_parts() -> None:
    parts = [{"type": "text", "text": "x"}] * 10
    messages = [{"role": "user", "content": parts}] * RequestLimits().max_messages
    assert _num_parts({"model": "m", "messages": messages}) < MAX_PARTS
    read_body(json.dumps({"model": "m", "messages": messages}).encode())


_COSTLY = {
    "lists": (b'{"prompt":[' + b"[]," * 2_000_000 + b"[]]}", "body: has more than"),
    "strings": (b'{"prompt":[' + b'"",' * 2_000_000 + b'""]}', "body: has more than"),
    "objects": (b'{"prompt":[' + b"{}," * 2_000_000 + b"{}]}", "body: has more than"),
    "biases": (b'{"prompt":"x","logit_bias":{' + b'"1":1,' * 1_000_000 + b'"1":1}}', "body: has more than"),
    "token ids": (b'{"prompt":[' + b"7," * 3_000_000 + b"7]}", "prompt: is 3000001 tokens, above the context of 512"),
    "token ids elsewhere": (b'{"prompt":"x","stop_token_ids":[' + b"7," * 3_000_000 + b"7]}", f"stop_token_ids: must be at most {MAX_IDS} token ids"),
    "fractions": (b'{"prompt":[' + b"0.1," * 2_000_000 + b"0.1]}", "prompt: must be at most 128 prompts"),
}


@pytest.mark.parametrize("name", _COSTLY)
def test_a_costly_body_is_refused_while_other_threads_go_on(name: str, model: ServedModel) -> None:
    raw, words = _COSTLY[name]
    refusals: list[StatusError] = []

    def refuse() -> None:
        try:
            completion_request(raw, model, RequestLimits(), request_id="r")
        except StatusError as error:
            refusals.append(error)

    thread = threading.Thread(target=refuse)
    began = last = time.monotonic()
    longest_s = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        longest_s, last = max(longest_s, time.monotonic() - last), time.monotonic()
    assert words in refusals[0].message
    # Held by the parser, the lock is held from the beginning almost to the end.
    assert longest_s < 0.1 + (last - began) / 2
