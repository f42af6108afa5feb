from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits import RequestLimits
from gateway.model_defaults import ModelDefaults
from gateway.resolved_request import ResolvedRequest, resolve
from gateway.sampling_checks import CHECKS
from gateway.served_model import ServedModel
from gateway.validation import check_request
from rpc.errors import StatusError
from tandem.v1 import gateway_pb2, generation_pb2
from tests.gateway.house import ask

LIMITS = RequestLimits()
NAN, INF = math.nan, math.inf


@pytest.fixture
def model(models: dict[str, ServedModel]) -> ServedModel:
    return models["smollm2"]


def problem(request: gateway_pb2.GenerateRequest, model: ServedModel, limits: RequestLimits = LIMITS) -> StatusError:
    with pytest.raises(StatusError) as refused:
        check_request(request, model, limits)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return refused.value


def resolved(request: gateway_pb2.GenerateRequest, model: ServedModel, num_prompt: int = 10, limits: RequestLimits = LIMITS, **fields: Any) -> ResolvedRequest:
    check_request(request, model, limits)
    return resolve(request, [1] * num_prompt, [], model, limits, **{"tenant": "t", "request_id": "r", "max_model_len": model.max_model_len, **fields})


def test_every_sampling_parameter_of_the_proto_has_a_check() -> None:
    assert set(CHECKS) == set(generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("temperature", [NAN, INF, -INF, -0.1, 2.5], [0, 0.7, 2]),
        ("top_p", [NAN, INF, 0, -1, 1.5], [0.1, 1]),
        ("top_k", [-2, -5], [-1, 0, 50]),
        ("min_p", [NAN, -0.1, 1.1], [0, 0.5, 1]),
        ("min_tokens", [], [0, 502]),
        ("n", [0, 17, 10**9], [1, 2, 16]),
        ("logprobs", [21, 10**9], [0, 20]),
        ("prompt_logprobs", [21, 10**9], [0, 20]),
        ("presence_penalty", [NAN, INF, -2.5, 2.5], [-2, 0, 2]),
        ("frequency_penalty", [NAN, INF, -2.5, 2.5], [-2, 0, 2]),
        ("repetition_penalty", [NAN, INF, 0, -1], [0.01, 1, 1.1, 100]),
        ("logit_bias", [{420: 1.0}, {5: NAN}, {5: INF}, {5: 100.5}, {5: 1.0, 6: -101}, {2**32 - 1: 0}], [{5: 1.0}, {0: -100, 419: 100}]),
        ("allowed_token_ids", [[420], [5] * 421], [[1], [5, 5, 419]]),
        ("bad_words", [[""], ["x", ""], ["x"] * 129, ["x" * 257]], [["x"], ["x" * 60] * 128]),
        ("bad_words_ids", [[[]], [[1], []], [[420]], [[1] * 65], [[1]] * 257], [[[1], [2, 3]], [[1] * 64] * 256]),
        ("stop", [[""], ["a"] * 17, ["x" * 257], ["a", ""]], [["a"], ["x" * 256]]),
        ("stop_token_ids", [[420], [2**32 - 1], [1] * 257], [[419], [0]]),
        ("seed", [], [0, 2**64 - 1]),
        ("ignore_eos", [], [True]),
        ("skip_special_tokens", [], [False]),
        ("include_stop_str_in_output", [], [True]),
    ],
)
def test_sampling_parameters_are_refused_by_their_full_name(field: str, bad: list[Any], good: list[Any], model: ServedModel) -> None:
    for value in bad:
        assert problem(ask("x", **{field: value}), model).field == f"sampling_params.{field}", value
    for value in good:
        resolved(ask("x", **{field: value}), model)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (gateway_pb2.GenerateRequest(), "input"),
        (ask(""), "text"),
        (ask("x", request_id="a b"), "request_id"),
        (ask("x", request_id="x" * 129), "request_id"),
        (ask("x", request_id="é"), "request_id"),
        (ask("x", request_id="-x"), "request_id"),
        (ask("x", request_id="x\n"), "request_id"),
        (ask(token_ids=generation_pb2.TokenIds()), "token_ids.ids"),
        (ask(token_ids=generation_pb2.TokenIds(ids=[1, 420])), "token_ids.ids"),
        (ask(chat=gateway_pb2.ChatMessages()), "chat.messages"),
        (ask(chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user")] * 1025)), "chat.messages"),
        (ask(chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user"), gateway_pb2.ChatMessage(role="")])), "chat.messages[1].role"),
        (ask(chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="end|><|system")])), "chat.messages[0].role"),
        (ask("x" * 10**6), "text"),
        (ask("x", output_token_ids=[420]), "output_token_ids"),
    ],
)
def test_other_fields_are_refused_by_name(request_: gateway_pb2.GenerateRequest, field: str, model: ServedModel) -> None:
    error = problem(request_, model)
    assert error.field == field
    assert error.message.startswith(f"{field}: ")


def test_lengths_are_refused_with_the_numbers(model: ServedModel) -> None:
    for num_prompt, request, field, numbers in (
        (0, ask("x"), "text", ()),
        (512, ask("x"), "text", ("512", "512")),
        (600, ask(token_ids=generation_pb2.TokenIds(ids=[1] * 600)), "token_ids.ids", ("600", "512")),
        (500, ask("x", max_tokens=13), "sampling_params.max_tokens", ("13", "500", "512", "12")),
        (10, ask("x", min_tokens=503), "sampling_params.min_tokens", ("503", "502")),
        (10, ask("x", max_tokens=2, output_token_ids=[1, 2, 3]), "output_token_ids", ("3", "2")),
    ):
        with pytest.raises(StatusError) as refused:
            resolved(request, model, num_prompt)
        assert refused.value.field == field
        assert all(number in refused.value.message for number in numbers)


@pytest.mark.parametrize("field", ["token_ids.ids", "output_token_ids"])
def test_millions_of_token_ids_are_refused_without_a_look_at_each(field: str, model: ServedModel) -> None:
    too_large_ids = [2**32 - 1] * 1_000_000
    request = ask(token_ids=generation_pb2.TokenIds(ids=too_large_ids)) if field == "token_ids.ids" else ask("x", output_token_ids=too_large_ids)
    error = problem(request, model)
    assert (error.field, error.message) == (field, f"{field}: is 1000000 tokens, above the context of 512")


def test_absent_parameters_are_resolved(model: ServedModel) -> None:
    got = resolved(ask("x"), model, 100)
    assert (got.max_tokens, got.min_tokens, got.n, got.skip_special_tokens, got.stop_token_ids) == (412, 0, 1, True, model.eos_token_ids)
    assert (got.sampling_params.max_tokens, got.sampling_params.seed) == (412, got.seed)
    assert got.seed != resolved(ask("x"), model).seed
    assert resolved(ask("x"), model, 100, max_model_len=150).max_tokens == 50
    assert resolved(ask("x"), model, 100, RequestLimits(max_new_tokens=7)).max_tokens == 7
    assert problem(ask("x", max_tokens=8), model, RequestLimits(max_new_tokens=7)).field == "sampling_params.max_tokens"


def test_given_parameters_stay_and_stop_strings_do_not_travel(model: ServedModel) -> None:
    got = resolved(ask("x", max_tokens=0, seed=0, temperature=0, stop=["s"], stop_token_ids=[9], ignore_eos=True, include_stop_str_in_output=True), model)
    assert (got.max_tokens, got.seed, got.stop, got.stop_token_ids) == (0, 0, ("s",), frozenset({9}))
    sent = got.sampling_params
    assert (sent.HasField("temperature"), sent.temperature, list(sent.stop), sent.include_stop_str_in_output) == (True, 0, [], False)
    assert (sent.HasField("max_tokens"), sent.HasField("seed"), list(sent.stop_token_ids), sent.ignore_eos) == (True, True, [9], True)


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=80))
def test_any_bytes_that_parse_are_served_or_refused_by_name(raw: bytes, models: dict[str, ServedModel]) -> None:
    request = gateway_pb2.GenerateRequest()
    try:
        request.sampling_params.ParseFromString(raw)
    except DecodeError:
        return
    request.text = "x"
    refused: StatusError | None = None
    try:
        resolved(request, models["smollm2"])
    except StatusError as error:
        refused = error
    assert refused is None or (refused.code is grpc.StatusCode.INVALID_ARGUMENT and refused.field)


def test_the_vocabulary_is_the_models_and_not_the_tokenizers(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    for file in model_dirs["smollm2"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 512}))
    resolved(ask("x", stop_token_ids=[511]), ServedModel.load(tmp_path))


def test_parameters_that_forbid_each_other_are_refused(model: ServedModel) -> None:
    eos = min(model.eos_token_ids)
    for request, field in (
        (ask("x", min_tokens=5, max_tokens=4), "sampling_params.min_tokens"),
        (ask("x", min_tokens=1, allowed_token_ids=[eos]), "sampling_params.allowed_token_ids"),
        (ask("x", min_tokens=1, allowed_token_ids=[7, 9, eos], stop_token_ids=[9, 7]), "sampling_params.allowed_token_ids"),
        (ask("x", n=2, output_token_ids=[5]), "output_token_ids"),
    ):
        assert problem(request, model).field == field
    for fine in (
        ask("x", min_tokens=4, max_tokens=4),
        ask("x", min_tokens=1, allowed_token_ids=[eos], ignore_eos=True),
        ask("x", min_tokens=1, allowed_token_ids=[eos, 7]),
        ask("x", allowed_token_ids=[eos]),
        ask("x", n=1, output_token_ids=[5]),
    ):
        resolved(fine, model)


def test_limits_of_an_operator_are_named(model: ServedModel) -> None:
    error = problem(ask("x", n=3), model, RequestLimits(max_samples=2))
    assert (error.field, error.message) == ("sampling_params.n", "sampling_params.n: must be at least 1 and at most max_samples 2, is 3")


def test_defaults_of_the_model_fill_what_a_client_leaves_out(model: ServedModel) -> None:
    defaults = ModelDefaults.of(
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 30, "do_sample": False}
    )
    with_defaults = replace(model, defaults=defaults)
    sent = resolved(ask("x", top_p=1.0, top_k=0), with_defaults).sampling_params
    assert [round(value, 6) for value in (sent.temperature, sent.top_p, sent.top_k, sent.min_p, sent.repetition_penalty)] == [0.6, 1, 0, 0.1, 1.1]
    assert sent.max_tokens == 30
    assert resolved(ask("x", max_tokens=40), with_defaults).max_tokens == 40
    assert resolved(ask("x"), with_defaults, 500).max_tokens == 12
    assert resolved(ask("x"), with_defaults, limits=RequestLimits(max_new_tokens=20)).max_tokens == 20
    assert not resolved(ask("x"), model).sampling_params.HasField("temperature")


def test_a_resume_has_no_log_probabilities_of_the_prompt(model: ServedModel) -> None:
    assert resolved(ask("x", prompt_logprobs=1), model).num_prompt_logprobs == 9
    again = resolved(ask("x", prompt_logprobs=1, output_token_ids=[5]), model)
    assert (again.num_prompt_logprobs, again.sampling_params.HasField("prompt_logprobs")) == (0, False)


def test_runs_of_bad_words_stand_beside_the_clients_own(model: ServedModel) -> None:
    request = ask("x", bad_words=["y"], bad_words_ids=[[1, 2]])
    sent = resolve(request, [1], [[3], [4]], model, LIMITS, tenant="t", request_id="r", max_model_len=512).sampling_params
    assert ([list(run.ids) for run in sent.bad_words_ids], list(sent.bad_words)) == ([[1, 2], [3], [4]], [])


def test_a_huge_parameter_is_refused_by_its_length(model: ServedModel) -> None:
    request = ask("x")
    request.sampling_params.allowed_token_ids.extend([2**32 - 1] * 1_000_000)
    assert problem(request, model).message.endswith("must be at most 420 token ids (the vocabulary's size), is 1000000")
