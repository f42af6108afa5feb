"""Conversions to tandem.v1 and back, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import proto
from engine.kv_cache import KvLayout
from engine.proto import FieldError
from engine.sampling_params import Finish, FinishReason, SampledToken, SamplingParams
from tandem.v1 import generation_pb2


def _float32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_nan=False)


def _message(**fields: Any) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(**{"max_tokens": 4, "seed": 1} | fields)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.integers(0, 2**32 - 1),
        temperature=_float32(0, 2),
        top_p=_float32(0.0009765625, 1),
        top_k=st.integers(0, 2**31 - 1),
        min_p=_float32(0, 1),
        seed=st.integers(0, 2**64 - 1),
        stop_token_ids=st.frozensets(st.integers(0, 99)),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(0, 20),
    )
)
def test_sampling_params_go_there_and_back(params: SamplingParams) -> None:
    assert proto.sampling_params_from_proto(proto.sampling_params_to_proto(params), vocab_size=100) == params


def test_absent_fields_mean_their_defaults() -> None:
    assert proto.sampling_params_from_proto(_message(), vocab_size=10) == SamplingParams(max_tokens=4, seed=1)
    assert proto.sampling_params_from_proto(_message(top_k=-1, n=1, repetition_penalty=1.0, stop=["x"]), vocab_size=10).top_k == 0


BAD: dict[str, Callable[[], generation_pb2.SamplingParams]] = {
    "max_tokens": lambda: generation_pb2.SamplingParams(seed=1),
    "seed": lambda: generation_pb2.SamplingParams(max_tokens=1),
    "temperature": lambda: _message(temperature=2.1),
    "top_p": lambda: _message(top_p=0.0),
    "top_k": lambda: _message(top_k=-2),
    "min_p": lambda: _message(min_p=1.5),
    "logprobs": lambda: _message(logprobs=21),
    "stop_token_ids": lambda: _message(stop_token_ids=[100]),
    "n": lambda: _message(n=2),
    "min_tokens": lambda: _message(min_tokens=1),
    "presence_penalty": lambda: _message(presence_penalty=0.5),
    "frequency_penalty": lambda: _message(frequency_penalty=math.nan),
    "repetition_penalty": lambda: _message(repetition_penalty=0.0),
    "logit_bias": lambda: _message(logit_bias={1: 1.0}),
    "allowed_token_ids": lambda: _message(allowed_token_ids=[1]),
    "bad_words": lambda: _message(bad_words=["x"]),
    "prompt_logprobs": lambda: _message(prompt_logprobs=0),
}


@pytest.mark.parametrize("name", BAD)
def test_a_value_out_of_range_is_refused_by_field_name(name: str) -> None:
    with pytest.raises(FieldError) as refused:
        proto.sampling_params_from_proto(BAD[name](), vocab_size=100)
    assert refused.value.field == f"sampling_params.{name}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_no_number_that_is_none_passes(name: str, value: float) -> None:
    with pytest.raises(FieldError):
        proto.sampling_params_from_proto(_message(**{name: value}), vocab_size=100)


def test_layouts_go_there_and_back() -> None:
    layout = KvLayout("abc", "bfloat16", 30, 3, 64, 16)
    assert proto.kv_layout_from_proto(proto.kv_layout_to_proto(layout)) == layout


def test_tokens_go_there_and_back() -> None:
    token = SampledToken(5, -0.5, ((5, -0.5), (6, -1.5)))
    assert proto.token_from_proto(5, proto.token_to_proto(token), vocab_size=10) == token
    assert proto.token_from_proto(5, None, vocab_size=10) == SampledToken(5)
    with pytest.raises(ValueError, match="no log probability"):
        proto.token_to_proto(SampledToken(5))


@pytest.mark.parametrize(
    ("token_id", "logprob"), [(10, None), (4, SampledToken(5, -1.0)), (5, SampledToken(5, math.nan)), (5, SampledToken(5, -1.0, ((1, math.inf),)))]
)
def test_a_token_that_cannot_be_is_refused(token_id: int, logprob: SampledToken | None) -> None:
    with pytest.raises(FieldError):
        proto.token_from_proto(token_id, proto.token_to_proto(logprob) if logprob else None, vocab_size=10)


@pytest.mark.parametrize("finish", [Finish(FinishReason.STOP, 0), Finish(FinishReason.LENGTH), Finish(FinishReason.ABORT)])
def test_finishes_go_there_and_back(finish: Finish) -> None:
    assert proto.finish_from_proto(proto.finish_to_proto(finish)) == finish


def test_a_finish_no_engine_gives_is_refused() -> None:
    with pytest.raises(FieldError):
        proto.finish_from_proto(generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_TOOL_CALLS))
