"""Conversions to tandem.v1 and back, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import proto
from engine.kv_cache import KvLayout
from engine.proto import FieldError
from engine.sampling_params import Finish, FinishReason, SampledToken, SamplingParams
from tandem.v1 import generation_pb2, prefill_pb2

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
TOKEN_IDS = st.integers(0, 99)


def _float32(low: float, high: float, *, exclude_min: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_nan=False, exclude_min=exclude_min)


def _run(*ids: int) -> generation_pb2.TokenIds:
    return generation_pb2.TokenIds(ids=ids)


def _message(**fields: Any) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(**{"max_tokens": 4, "seed": 1} | fields)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(8, 2**32 - 1),
    n=st.integers(1, 16),
    min_tokens=st.integers(0, 8),
    temperature=_float32(0, 2),
    top_p=_float32(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=_float32(0, 1),
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 15),
    stop_token_ids=st.frozensets(TOKEN_IDS),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    presence_penalty=_float32(-2, 2),
    frequency_penalty=_float32(-2, 2),
    repetition_penalty=_float32(0, LARGEST_FLOAT32, exclude_min=True),
    logit_bias=st.dictionaries(TOKEN_IDS, _float32(-100, 100), max_size=5).map(lambda biases: tuple(sorted(biases.items()))),
    allowed_token_ids=st.lists(TOKEN_IDS, unique=True, max_size=5).map(tuple),
    bad_words_ids=st.lists(st.lists(TOKEN_IDS, min_size=1, max_size=4).map(tuple), max_size=3).map(tuple),
)


@given(PARAMS)
def test_sampling_params_go_there_and_back(params: SamplingParams) -> None:
    message = proto.sampling_params_to_proto(params)
    assert proto.sampling_params_from_proto(message, vocab_size=100, sample_index=params.sample_index) == params


@given(st.floats(0.01, 2), st.floats(0.01, 1), st.floats(-100, 100))
def test_numbers_are_rounded_by_the_first_trip_only(temperature: float, top_p: float, bias: float) -> None:
    """Whoever takes part computes with the same numbers, however often they have travelled."""
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, logit_bias=((3, bias),))
    once = proto.sampling_params_from_proto(proto.sampling_params_to_proto(params), vocab_size=100)
    assert once.temperature == float(np.float32(temperature))
    assert once.logit_bias == ((3, float(np.float32(bias))),)
    assert proto.sampling_params_from_proto(proto.sampling_params_to_proto(once), vocab_size=100) == once


def test_absent_fields_mean_their_defaults() -> None:
    assert proto.sampling_params_from_proto(_message(), vocab_size=10) == SamplingParams(max_tokens=4, seed=1)
    assert proto.sampling_params_from_proto(_message(top_k=-1, n=1, repetition_penalty=1.0, stop=["x"]), vocab_size=10).top_k == 0
    assert proto.sampling_params_from_proto(_message(logprobs=0, prompt_logprobs=0), vocab_size=10).prompt_logprobs == 0


def test_an_allowed_token_counts_once() -> None:
    assert proto.sampling_params_from_proto(_message(allowed_token_ids=[7, 3, 7, 3]), vocab_size=10).allowed_token_ids == (7, 3)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": 2.1}),
    ("top_p", {"top_p": 0.0}),
    ("top_p", {"top_p": 1e-46}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("logprobs", {"logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("stop_token_ids", {"stop_token_ids": [100]}),
    ("n", {"n": 0}),
    ("n", {"n": 17}),
    ("n", {"n": 2**32 - 1}),
    ("min_tokens", {"min_tokens": 5}),
    ("presence_penalty", {"presence_penalty": -2.1}),
    ("frequency_penalty", {"frequency_penalty": 2.1}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": -1.0}),
    ("logit_bias", {"logit_bias": {1: 100.5}}),
    ("logit_bias", {"logit_bias": {1: math.nan}}),
    ("logit_bias", {"logit_bias": {1: 1.0, 2: -math.inf}}),
    ("logit_bias", {"logit_bias": {100: 1.0}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 0.5)}),
    ("allowed_token_ids", {"allowed_token_ids": [1, 100]}),
    ("bad_words", {"bad_words": ["x"]}),
    ("bad_words_ids", {"bad_words_ids": [_run(5), _run()]}),
    ("bad_words_ids", {"bad_words_ids": [_run(5, 100)]}),
    ("bad_words_ids", {"bad_words_ids": [_run(*[5] * 65)]}),
    ("bad_words_ids", {"bad_words_ids": [_run(5)] * 257}),
]


@pytest.mark.parametrize(("name", "fields"), BAD, ids=[f"{name}-{place}" for place, (name, _) in enumerate(BAD)])
def test_a_value_out_of_range_is_refused_by_field_name(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(FieldError) as refused:
        proto.sampling_params_from_proto(_message(**fields), vocab_size=100)
    assert refused.value.field == f"sampling_params.{name}"


@pytest.mark.parametrize("name", ["max_tokens", "seed"])
def test_what_the_gateway_decides_must_be_set(name: str) -> None:
    message = _message()
    message.ClearField(name)
    with pytest.raises(FieldError, match="must be set") as refused:
        proto.sampling_params_from_proto(message, vocab_size=100, field="start.sampling_params")
    assert refused.value.field == f"start.sampling_params.{name}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_no_number_that_is_none_passes(name: str, value: float) -> None:
    with pytest.raises(FieldError) as refused:
        proto.sampling_params_from_proto(_message(**{name: value}), vocab_size=100)
    assert refused.value.field == f"sampling_params.{name}"


def test_layouts_go_there_and_back() -> None:
    for layout in (KvLayout("abc", "bfloat16", 30, 3, 64, 16), KvLayout("abc", "float32", 2, 12, 4, 8, version=2, num_head_shards=6)):
        assert proto.kv_layout_from_proto(proto.kv_layout_to_proto(layout)) == layout


def test_a_layout_that_does_not_say_its_shards_is_not_taken_for_one_of_one_shard() -> None:
    layout = KvLayout("abc", "bfloat16", 30, 3, 64, 16)
    message = proto.kv_layout_to_proto(layout)
    assert message.num_head_shards == 1
    message.ClearField("num_head_shards")
    assert layout.differences(proto.kv_layout_from_proto(message)) == {"num_head_shards": (1, 0)}


@pytest.mark.parametrize("token", [SampledToken(5), SampledToken(5, -0.5), SampledToken(5, -math.inf, ((6, -1.5), (5, -math.inf)))], ids=str)
def test_first_tokens_go_there_and_back(token: SampledToken) -> None:
    assert proto.first_token_from_proto(proto.first_token_to_proto(token), vocab_size=10) == token


def test_prompt_logprobs_go_there_and_back_in_order() -> None:
    entries = (SampledToken(5, -0.5, ((5, -0.5), (6, -1.5))), SampledToken(9, -2.0))
    assert proto.prompt_logprobs_from_proto(map(proto.token_to_proto, entries), vocab_size=10) == entries
    with pytest.raises(ValueError, match="no log probability"):
        proto.token_to_proto(SampledToken(5))


NOT_TOKENS = [SampledToken(10, -1.0), SampledToken(5, -1.0, ((10, -1.0),)), *(SampledToken(5, bad) for bad in (math.nan, math.inf))]
NOT_TOKENS += [SampledToken(5, -1.0, ((5, -1.0), (6, bad))) for bad in (math.nan, math.inf)]


@pytest.mark.parametrize("token", NOT_TOKENS, ids=str)
def test_a_token_that_cannot_be_is_refused(token: SampledToken) -> None:
    with pytest.raises(FieldError, match="first_tokens"):
        proto.first_token_from_proto(proto.first_token_to_proto(token), vocab_size=10)
    with pytest.raises(FieldError, match="prompt_logprobs"):
        proto.prompt_logprobs_from_proto([proto.token_to_proto(SampledToken(1, -1.0)), proto.token_to_proto(token)], vocab_size=10)


def test_a_first_token_and_its_log_probability_are_of_one_id() -> None:
    for message in (prefill_pb2.FirstToken(token_id=10), prefill_pb2.FirstToken(token_id=4, logprob=proto.token_to_proto(SampledToken(5, -1.0)))):
        with pytest.raises(FieldError, match="first_tokens"):
            proto.first_token_from_proto(message, vocab_size=10)


@pytest.mark.parametrize("finish", [Finish(FinishReason.STOP, 0), Finish(FinishReason.LENGTH), Finish(FinishReason.ABORT)])
def test_finishes_go_there_and_back(finish: Finish) -> None:
    assert proto.finish_from_proto(proto.finish_to_proto(finish)) == finish


def test_a_finish_no_engine_gives_is_refused() -> None:
    with pytest.raises(FieldError):
        proto.finish_from_proto(generation_pb2.Finish(finish_reason=generation_pb2.FINISH_REASON_TOOL_CALLS))
