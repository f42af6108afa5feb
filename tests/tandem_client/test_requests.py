"""What a call's arguments become, and which are refused before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.v1 import gateway_pb2, generation_pb2
from tandem_client import ChatMessage, Client, Options, Sampling, TlsConfig
from tandem_client.connection import Connection, is_this_host
from tandem_client.options import Terms
from tandem_client.prompt import chat_request, prompt_request
from tandem_client.sampling import sampling_params


def test_every_field_of_the_requests_parameters_can_be_given_by_its_own_name() -> None:
    assert set(Sampling.__annotations__) == set(generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert set(Options.__annotations__) == set(Sampling.__annotations__) | set(Terms.__annotations__)


def test_parameters_arrive_as_given_and_none_stays_unset() -> None:
    given: Options = {
        "temperature": 0.0,
        "top_k": -1,
        "stop": "END",
        "logit_bias": {5: -2.5},
        "bad_words_ids": [[1, 2], [3]],
        "ignore_eos": True,
        "seed": 2**64 - 1,
        "min_p": None,
        "model": "m",
        "request_id": "r",
        "priority": -2,
        "echo": True,
        "timeout_s": 3.0,
    }
    request = prompt_request([5, 6], given)
    assert request == gateway_pb2.GenerateRequest(
        request_id="r",
        model="m",
        priority=-2,
        echo=True,
        token_ids=generation_pb2.TokenIds(ids=[5, 6]),
        sampling_params=generation_pb2.SamplingParams(
            temperature=0.0,
            top_k=-1,
            stop=["END"],
            logit_bias={5: -2.5},
            bad_words_ids=[generation_pb2.TokenIds(ids=[1, 2]), generation_pb2.TokenIds(ids=[3])],
            ignore_eos=True,
            seed=2**64 - 1,
        ),
    )
    assert request.sampling_params.HasField("temperature")


def test_a_request_without_an_id_gets_one() -> None:
    assert len({prompt_request("x", {}).request_id for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"temprature": 1.0}, TypeError, "'temprature'"),
        ({"temperature": "hot"}, TypeError, "temperature: "),
        ({"max_tokens": 2**40}, ValueError, "max_tokens: "),
        ({"max_tokens": -1}, ValueError, "max_tokens: "),
        ({"seed": 2**64}, ValueError, "seed: "),
        ({"bad_words": "word"}, TypeError, "bad_words: a list of texts"),
        ({"stop_token_ids": ["a"]}, TypeError, "stop_token_ids: "),
        ({"logit_bias": {-1: 2.0}}, ValueError, "logit_bias: "),
        ({"bad_words_ids": [[-1]]}, ValueError, "bad_words_ids: "),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_by_name(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        sampling_params(given)
    with Client("127.0.0.1:1") as client, pytest.raises(error, match=text):
        client.generate("x", **given)


def test_a_conversation_is_turns_of_role_and_content() -> None:
    request = chat_request([{"role": "user", "content": "hi"}], {})
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "hi")]
    assert chat_request([], {}).WhichOneof("input") == "chat", "the gateway says what is wrong with none"
    wrong: Any
    for wrong in ({"role": "user"}, {"role": "user", "content": "x", "name": "y"}, ("user", "hi"), {"role": "user", "content": [{"type": "text"}]}):
        with pytest.raises(TypeError, match=r"messages\[1\]"):
            chat_request([ChatMessage(role="user", content="hi"), wrong], {})


@pytest.mark.parametrize("prompt", [["a"], 5, None, b"text"])
def test_a_prompt_is_a_text_or_token_ids(prompt: Any) -> None:
    with pytest.raises(TypeError, match="prompt: "):
        prompt_request(prompt, {})


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("localhost:50051", True),
        ("127.0.0.1:50051", True),
        ("127.8.0.1", True),
        ("[::1]:50051", True),
        ("dns:///localhost:1", True),
        ("unix:/run/tandem", True),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", True),
        ("ipv4:127.0.0.1:1,10.0.0.1:2", False),
        ("gateway:50051", False),
        ("localhost.example.com:50051", False),
        ("10.0.0.1:50051", False),
        ("dns:///gateway:50051", False),
        ("dns://127.0.0.1/gateway:50051", False),
        ("[2001:db8::1]:50051", False),
    ],
)
def test_a_key_goes_to_this_host_only_unless_it_is_encrypted(target: str, expected: bool) -> None:
    assert is_this_host(target) is expected
    if expected:
        Connection(target, api_key="k")
        return
    with pytest.raises(ValueError, match="plain text"):
        Client(target, api_key="k")
    assert Connection(target, TlsConfig(), "k").metadata == (("authorization", "Bearer k"),)
    assert Connection(target, None, "k", plaintext_api_key=True).metadata == (("authorization", "Bearer k"),)


def test_a_key_is_shown_nowhere() -> None:
    assert "secret" not in repr(Connection("localhost:1", api_key="secret"))
    with pytest.raises(ValueError, match="printable") as raised:
        Connection("localhost:1", api_key="secret\n")
    assert "secret" not in str(raised.value)


def test_a_certificate_needs_its_key_and_files_that_are_not_there_are_found_at_once() -> None:
    with pytest.raises(ValueError, match="together"):
        TlsConfig(cert_chain="chain.pem")
    with pytest.raises(FileNotFoundError):
        Client("gateway:1", tls=TlsConfig(root="/nonexistent/root.pem"))
