"""OpenAI's bodies become our requests, and what cannot is refused by the name that the client used."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.asked import Asked
from gateway.http.chat_request import chat_request
from gateway.http.completion_request import completion_request
from gateway.http.errors import HttpError, payload
from gateway.http.field_names import openai_field, openai_message
from gateway.limits import RequestLimits
from gateway.served_model import ServedModel
from gateway.validation import check_request
from rpc.errors import StatusError
from tandem.v1 import gateway_pb2
from tests.gateway.house import ask

LIMITS = RequestLimits()
HELLO: dict[str, Any] = {"model": "m", "prompt": "hello"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="session")
def served(models: dict[str, ServedModel]) -> ServedModel:
    return models["smollm2"]


def _completion(body: object, served: ServedModel) -> Asked:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return completion_request(raw, served, LIMITS, request_id="r1")


def _chat(body: object, served: ServedModel) -> Asked:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return chat_request(raw, served, LIMITS, request_id="r1")


def _request(text: str = "hello", **fields: Any) -> gateway_pb2.GenerateRequest:
    return ask(text, **{"model": "m", "request_id": "r1", "max_tokens": 16} | fields)


def _unbounded() -> gateway_pb2.GenerateRequest:
    request = _request()
    request.sampling_params.ClearField("max_tokens")
    return request


COMPLETIONS: dict[str, tuple[dict[str, Any], gateway_pb2.GenerateRequest]] = {
    "the least": ({}, _request()),
    "as much as fits": ({"max_tokens": None}, _unbounded()),
    "nulls": ({"temperature": None, "n": None, "stop": None, "seed": None, "logit_bias": None, "echo": None, "user": None}, _request()),
    "numbers": (
        {"temperature": 0, "top_p": 0.5, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.1},
        _request(temperature=0.0, top_p=0.5, min_p=0.1, presence_penalty=1.0, frequency_penalty=-1.5, repetition_penalty=1.1),
    ),
    "whole numbers": ({"n": 2, "max_tokens": 5, "min_tokens": 3, "top_k": -1, "best_of": 2}, _request(n=2, max_tokens=5, min_tokens=3, top_k=-1)),
    "flags": (
        {"ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True},
        _request(ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True),
    ),
    "one stop string": ({"stop": "\n"}, _request(stop=["\n"])),
    "stop strings and ids": ({"stop": ["a", "é"], "stop_token_ids": [3, 4]}, _request(stop=["a", "é"], stop_token_ids=[3, 4])),
    "words": ({"bad_words": ["x"], "bad_words_ids": [[1, 2], [3]]}, _request(bad_words=["x"], bad_words_ids=[[1, 2], [3]])),
    "ids": ({"allowed_token_ids": [7, 8], "logit_bias": {"9": -100, "10": 0.5}}, _request(allowed_token_ids=[7, 8], logit_bias={9: -100.0, 10: 0.5})),
    "a seed": ({"seed": 2**64 - 1}, _request(seed=2**64 - 1)),
    "a seed below 0 is the number with the same bits": ({"seed": -1}, _request(seed=2**64 - 1)),
    "log probabilities": ({"logprobs": 0}, _request(logprobs=0)),
    "log probabilities of an echo": ({"logprobs": 2, "echo": True}, _request(logprobs=2, prompt_logprobs=2, echo=True)),
    "log probabilities of the prompt alone": ({"prompt_logprobs": 1}, _request(prompt_logprobs=1)),
    "a priority and an id": ({"priority": -2, "request_id": "mine"}, _request(priority=-2, request_id="mine")),
    "what says nothing": (
        {"user": "u", "suffix": "", "store": False, "metadata": {}, "service_tier": "auto", "response_format": {"type": "text"}, "add_special_tokens": True},
        _request(),
    ),
    "as vllm bench serve asks": (
        {"repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
        _request(repetition_penalty=1.0, max_tokens=8, ignore_eos=True),
    ),
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completion_bodies_become_requests(name: str, served: ServedModel) -> None:
    fields, expected = COMPLETIONS[name]
    asked = _completion(HELLO | fields, served)
    assert asked.requests == (expected,)
    assert asked.stream is bool(fields.get("stream"))


PROMPTS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "a text": ("hello", [{"text": "hello"}]),
    "texts": (["a", "b"], [{"text": "a"}, {"text": "b"}]),
    "one text in a list": (["a"], [{"text": "a"}]),
    "ids": ([5, 6], [{"token_ids": gateway_pb2.GenerateRequest(token_ids={"ids": [5, 6]}).token_ids}]),
    "lists of ids": ([[5], [6, 7]], [{"token_ids": {"ids": [5]}}, {"token_ids": {"ids": [6, 7]}}]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_of_every_form_become_a_request_each(name: str, served: ServedModel) -> None:
    prompt, inputs = PROMPTS[name]
    asked = _completion({"model": "m", "prompt": prompt}, served)
    ids = ["r1"] if len(inputs) == 1 else [f"r1-{index}" for index in range(len(inputs))]
    expected = [
        gateway_pb2.GenerateRequest(model="m", request_id=one, sampling_params={"max_tokens": 16}, **each) for one, each in zip(ids, inputs, strict=True)
    ]
    assert list(asked.requests) == expected


CHATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the least": ({}, {}),
    "max_tokens": ({"max_tokens": 5}, {"max_tokens": 5}),
    "max_completion_tokens": ({"max_completion_tokens": 5}, {"max_tokens": 5}),
    "both": ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
    "log probabilities": ({"logprobs": True}, {"logprobs": 0}),
    "likeliest ones": ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
    "none": ({"logprobs": False, "top_logprobs": 0}, {}),
    "the template's special tokens": ({"add_special_tokens": False}, {}),
    "no tools": ({"tools": [], "tool_choice": "none", "parallel_tool_calls": True}, {}),
    "as guidellm asks": (
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "max_completion_tokens": 8, "ignore_eos": True},
        {"max_tokens": 8, "ignore_eos": True},
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_chat_bodies_become_requests(name: str, served: ServedModel) -> None:
    fields, params = CHATS[name]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    expected = gateway_pb2.GenerateRequest(model="m", request_id="r1", chat=chat, sampling_params=params)
    assert _chat(CHAT | fields, served).requests == (expected,)


def test_content_may_come_in_parts(served: ServedModel) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": "", "tool_calls": [], "refusal": None},
    ]
    (request,) = _chat({"messages": messages}, served).requests
    assert [(message.role, message.content) for message in request.chat.messages] == [("system", "s"), ("user", "ab"), ("assistant", "")]


BAD_COMPLETIONS: dict[str, tuple[Any, str, str]] = {
    "no bytes": (b"", "body", "is no JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', "body", "is not UTF-8"),
    "a list": ([1], "body", "must be a JSON object"),
    "deep": (b'{"prompt": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", "body", "is no JSON"),
    "a name twice": (b'{"prompt": "a", "prompt": "b"}', "body", 'says "prompt" twice'),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "body", "NaN is no number"),
    "infinity": (b'{"prompt": "a", "top_p": -Infinity}', "body", "-Infinity is no number"),
    "digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "body", "is no JSON"),
    "no prompt": ({"model": "m"}, "prompt", "must be given"),
    "an empty list": (HELLO | {"prompt": []}, "prompt", "must not be empty"),
    "a number": (HELLO | {"prompt": 5}, "prompt", "must be a string, a list"),
    "mixed": (HELLO | {"prompt": ["a", 5]}, "prompt[1]", "must be a string, is 5"),
    "ids that are none": (HELLO | {"prompt": [5, True]}, "prompt[1]", "must be a whole number, is true"),
    "ids below 0": (HELLO | {"prompt": [[5, -1]]}, "prompt[0][1]", "must be from 0"),
    "too many prompts": (HELLO | {"prompt": ["a"] * 129}, "prompt", "at most 128 prompts"),
    "half a character": (b'{"prompt": "ab\\ud800"}', "prompt", "half a character (a lone surrogate) at 2"),
    "a flag that is a number": (HELLO | {"stream": 1}, "stream", "must be true or false, is 1"),
    "a number that is a flag": (HELLO | {"n": True}, "n", "must be a whole number, is true"),
    "a number in a text": (HELLO | {"temperature": "0.5"}, "temperature", 'must be a number, is "0.5"'),
    "a whole number with a point": (HELLO | {"max_tokens": 5.0}, "max_tokens", "must be a whole number, is 5.0"),
    "a number without end": (HELLO | {"top_p": 10**400}, "top_p", "must be a number"),
    "max_tokens below 0": (HELLO | {"max_tokens": -1}, "max_tokens", "must be from 0 to 4294967295, is -1"),
    "a large seed": (HELLO | {"seed": 2**64}, "seed", "must be from -9223372036854775808 to 18446744073709551615"),
    "a stop string that is none": (HELLO | {"stop": ["a", 1]}, "stop[1]", "must be a string, is 1"),
    "a bias without a token": (HELLO | {"logit_bias": {"x": 1}}, "logit_bias.x", "must be named by a token id"),
    "a bias that is none": (HELLO | {"logit_bias": {"5": "1"}}, "logit_bias.5", "must be a number"),
    "a token with two biases": (HELLO | {"logit_bias": {"7": 1, "07": 2}}, "logit_bias.07", "must be named by a token id"),
    "a bias of half a character": (HELLO | {"logit_bias": {"\ud800": 1}}, "logit_bias.\\ud800", "must be named by a token id"),
    "a list of biases": (HELLO | {"logit_bias": [1]}, "logit_bias", "must be an object, is a list"),
    "words that are ids": (HELLO | {"bad_words_ids": [1]}, "bad_words_ids", "must be a list of lists"),
    "best_of": (HELLO | {"best_of": 3, "n": 2}, "best_of", "must be n (2)"),
    "a suffix": (HELLO | {"suffix": "x"}, "suffix", "is not supported"),
    "a format": (HELLO | {"response_format": {"type": "json_object"}}, "response_format.type", 'must be text, is "json_object"'),
    "a long format": (HELLO | {"response_format": {"type": "x" * 100_000}}, "response_format.type", "must be text, is"),
    "a schema that vLLM would ignore": (HELLO | {"guided_json": {}}, "guided_json", "is not supported"),
    "options without a stream": (HELLO | {"stream_options": {"include_usage": True}}, "stream_options", "may only be given with stream"),
    "an unknown option": (HELLO | {"stream": True, "stream_options": {"include": True}}, "stream_options.include", "is no field"),
    "a misspelt field": (HELLO | {"temprature": 1}, "temprature", "is temperature meant?"),
    "a name of half a character": (HELLO | {"\ud800": 1}, "\\ud800", "is no field"),
    "no name": (HELLO | {"": 1}, '""', "is no field"),
    "a name of two lines": (HELLO | {"a\nb": 1}, "a\\nb", "is no field"),
    "no special tokens": (HELLO | {"add_special_tokens": False}, "add_special_tokens", "is not supported"),
    "chat's field": (HELLO | {"messages": []}, "messages", "is no field"),
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_bad_completion_bodies_are_refused_by_name(name: str, served: ServedModel) -> None:
    body, field, text = BAD_COMPLETIONS[name]
    with pytest.raises(StatusError) as refused:
        _completion(body, served)
    assert (refused.value.code.name, refused.value.field) == ("INVALID_ARGUMENT", field)
    assert refused.value.message.startswith(f"{field}: ")
    assert text in refused.value.message
    assert len(refused.value.message) < 400
    assert refused.value.message.isprintable()
    assert payload(HttpError.of(refused.value).body())


@pytest.mark.parametrize("read", [completion_request, chat_request])
def test_samples_without_number_are_refused_before_they_cost_anything(read: Callable[..., Asked], served: ServedModel) -> None:
    n = 1_000_000
    raw = json.dumps({"n": n, "stream": True, **({"prompt": ["a"] * 4} if read is completion_request else {"messages": CHAT["messages"]})}).encode()
    tracemalloc.start()
    try:
        asked = read(raw, served, LIMITS, request_id="r1")
        assert tracemalloc.get_traced_memory()[1] < n
    finally:
        tracemalloc.stop()
    with pytest.raises(StatusError, match="must be at least 1 and at most max_samples 16, is 1000000") as refused:
        check_request(asked.requests[0], served, LIMITS)
    assert openai_field(refused.value.field) == "n"


def _messages(*messages: object) -> dict[str, object]:
    return {"messages": list(messages)}


BAD_CHATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no messages": ({"model": "m"}, "messages", "must be given"),
    "an object": ({"messages": {}}, "messages", "must be a list of messages, is an object"),
    "too many": ({"messages": [{"role": "user", "content": "x"}] * 1025}, "messages", "at most 1024 messages"),
    "a text": (_messages("x"), "messages[0]", 'must be an object, is "x"'),
    "no role": (_messages({"content": "x"}), "messages[0].role", "must be given"),
    "no content": (_messages({"role": "user"}), "messages[0].content", "must be given"),
    "a number": (_messages({"role": "user", "content": 5}), "messages[0].content", "must be a string, is 5"),
    "an image": (
        _messages({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}),
        "messages[0].content[1].type",
        'must be text, is "image_url"',
    ),
    "a part without text": (_messages({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0].text", "must be given"),
    "a part of two kinds": (_messages({"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}), "messages[0].content[0].y", "is no field"),
    "half a character": (_messages({"role": "user", "content": "\ud800"}), "messages[0].content", "half a character"),
    "a name": (_messages({"role": "user", "content": "x", "name": "n"}), "messages[0].name", "is not supported"),
    "a call": (_messages({"role": "assistant", "content": "x", "tool_calls": [{}]}), "messages[0].tool_calls", "is not supported"),
    "an unknown field": (_messages({"role": "user", "content": "x", "z": 1}), "messages[0].z", "is no field"),
    "two limits": (CHAT | {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "they mean the same"),
    "likeliest ones of none": (CHAT | {"top_logprobs": 2}, "top_logprobs", "may only be given with logprobs"),
    "more of the likeliest than there are to be had": (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be from 0 to 20, is 21"),
    "special tokens beside the template's": (CHAT | {"add_special_tokens": True}, "add_special_tokens", "is not supported"),
    "completions' logprobs": (CHAT | {"logprobs": 2}, "logprobs", "must be true or false"),
    "tools": (CHAT | {"tools": [{}]}, "tools", "is not supported"),
    "a choice": (CHAT | {"tool_choice": "required"}, "tool_choice", "is not supported"),
    "effort": (CHAT | {"reasoning_effort": "low"}, "reasoning_effort", "is not supported"),
    "a prompt": (CHAT | {"prompt": "x"}, "prompt", "is no field"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_bad_chat_bodies_are_refused_by_name(name: str, served: ServedModel) -> None:
    body, field, text = BAD_CHATS[name]
    with pytest.raises(StatusError) as refused:
        _chat(body, served)
    assert (refused.value.code.name, refused.value.field) == ("INVALID_ARGUMENT", field)
    assert text in refused.value.message


_NAMES = ("prompt", "messages", "model", "stream", "stream_options", "n", "seed", "stop", "logit_bias", "temperature", "max_tokens", "logprobs", "tools", "x")
_ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=5)
"""Halves of characters too."""
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | _ANY_TEXT | st.sampled_from(("user", "text")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from((*_NAMES, "role", "content", "type", "text")) | _ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)


def _outcome(read: Callable[..., Asked], raw: bytes, served: ServedModel) -> Asked | StatusError:
    try:
        return read(raw, served, LIMITS, request_id="r")
    except StatusError as refused:
        return refused


@settings(max_examples=300, deadline=None)
@given(body=st.dictionaries(st.sampled_from(_NAMES) | _ANY_TEXT, _JSON, max_size=6), raw=st.binary(max_size=40))
def test_any_body_is_a_request_or_is_refused(body: dict[str, Any], raw: bytes, served: ServedModel) -> None:
    for made in (json.dumps(body).encode(), raw, json.dumps(HELLO | body).encode(), json.dumps(CHAT | body).encode()):
        for read in (completion_request, chat_request):
            outcome = _outcome(read, made, served)
            if isinstance(outcome, Asked):
                assert outcome.requests
            else:
                assert (outcome.code.name, bool(outcome.field)) == ("INVALID_ARGUMENT", True)
                assert payload(HttpError.of(outcome).body())


def test_fields_of_the_core_have_openai_names() -> None:
    names = {
        "sampling_params.top_p": "top_p",
        "request.sampling_params.n": "n",
        "chat.messages[2].role": "messages[2].role",
        "chat.messages": "messages",
        "token_ids.ids": "prompt",
        "token_ids.ids[3]": "prompt[3]",
        "text": "prompt",
        "text_format": "text_format",
        "request_id": "request_id",
    }
    assert {name: openai_field(name) for name in names} == names
    assert openai_message("sampling_params.top_p: must be above 0", "sampling_params.top_p") == "top_p: must be above 0"
    assert openai_message("the deadline passed", "") == "the deadline passed"
