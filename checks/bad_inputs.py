"""The closed table of what a client can get wrong at the gateway's door: a row for every field of the contract and every way in which it can be bad.

A new field without a row fails tests/gateway/test_bad_inputs.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from checks.refusals import GENERATE_UNARY, BadInput, Code, Facts, Make, bytes_field, fixed64_field, leaf_paths, varint, varint_field
from tandem.v1 import decode_pb2, prefill_pb2
from tandem.v1.gateway_pb2 import ChatMessage, ChatMessages
from tandem.v1.gateway_pb2 import GenerateRequest as Request
from tandem.v1.generation_pb2 import SamplingParams, TokenIds

_PARAMS = "sampling_params."
_NUMBERS = {field.name: field.number for field in Request.DESCRIPTOR.fields}
_PARAM_NUMBERS = {field.name: field.number for field in SamplingParams.DESCRIPTOR.fields}
_MIB = 1 << 20


def _request(**fields: Any) -> Any:
    """A good request but for `fields`, which are its own or those of its sampling parameters."""
    own = {name: fields.pop(name) for name in tuple(fields) if name in _NUMBERS}
    if not own.keys() & {"text", "token_ids", "chat"}:
        own["text"] = "Once"
    return Request(**own, sampling_params=SamplingParams(**{"max_tokens": 1} | fields))


def _made(build: Callable[[Facts], dict[str, Any]]) -> Make:
    return lambda facts: _request(**build(facts)).SerializeToString()


def _always(**fields: Any) -> Make:
    return lambda _: _request(**fields).SerializeToString()


def _raw(extra: bytes) -> Make:
    """A good request and more bytes: later fields stand over earlier ones."""
    return lambda _: _request().SerializeToString() + extra


def _raw_param(name: str, value: int) -> Make:
    return _raw(bytes_field(_NUMBERS["sampling_params"], varint_field(_PARAM_NUMBERS[name], value)))


def _param(name: str, value: Any, what: str = "") -> BadInput:
    return BadInput(f"{name} {what or value}", _PARAMS + name, _always(**{name: value}), field=_PARAMS + name)


def _param_of(name: str, what: str, build: Callable[[Facts], Any], *, about: str = "") -> BadInput:
    return BadInput(f"{name} {what}", _PARAMS + (about or name), _made(lambda facts: {name: build(facts)}), field=_PARAMS + name)


_OUT_OF_RANGE: dict[str, tuple[float, ...]] = {
    "temperature": (-0.01, 2.01),
    "top_p": (0.0, -0.5, 1.01),
    "min_p": (-0.01, 1.01),
    "presence_penalty": (-2.01, 2.01),
    "frequency_penalty": (-2.01, 2.01),
    "repetition_penalty": (0.0, -1.0),
}
_NO_NUMBERS = (math.nan, math.inf, -math.inf)


def _floats() -> Iterator[BadInput]:
    for name, values in _OUT_OF_RANGE.items():
        yield from (_param(name, value) for value in (*_NO_NUMBERS, *values))
    for bias in (*_NO_NUMBERS, -100.5, 100.5):
        yield _param("logit_bias", {5: bias}, f"of {bias}")


def _integers() -> Iterator[BadInput]:
    yield _param("top_k", -2)
    yield _param("top_k", -(2**31))
    for name in ("n", "max_tokens", "logprobs", "prompt_logprobs"):
        yield BadInput(f"{name} -1 as a varint", _PARAMS + name, _raw_param(name, -1), field=_PARAMS + name)
    yield _param("n", 0)
    yield _param_of("n", "over the limit", lambda facts: facts.limits.max_samples + 1)
    yield _param("n", 10**9)
    yield _param_of("max_tokens", "over the context", lambda facts: facts.max_model_len)
    yield _param("max_tokens", 2**32 - 1)
    yield _param("min_tokens", 2, "over max_tokens")
    yield BadInput(
        "min_tokens over the default of max_tokens",
        _PARAMS + "min_tokens",
        lambda _: Request(text="Once", sampling_params=SamplingParams(min_tokens=2**31)).SerializeToString(),
        field=_PARAMS + "min_tokens",
    )
    for name in ("logprobs", "prompt_logprobs"):
        yield _param_of(name, "over the limit", lambda facts: facts.limits.max_logprobs + 1)
    yield BadInput("seed longer than a varint may be", _PARAMS + "seed", _raw(bytes_field(6, varint_field(13, 0)[:-1] + b"\xff" * 11)), field="request")


def _collections() -> Iterator[BadInput]:
    for name in ("stop", "bad_words"):
        yield _param(name, [f"s{index}" for index in range(300)], "300 strings")
        yield _param(name, ["x", ""], "empty string")
    yield _param_of("stop", "one over the limit", lambda facts: ["x"] * (facts.limits.max_stop_strings + 1))
    yield _param_of("stop", "too long", lambda facts: ["x" * (facts.limits.max_stop_string_chars + 1)])
    yield _param_of("bad_words", "one over the limit", lambda facts: ["x"] * (facts.limits.max_bad_words + 1))
    yield _param_of("bad_words", "too long", lambda facts: ["x" * (facts.limits.max_bad_word_chars + 1)])
    for name in ("stop_token_ids", "allowed_token_ids"):
        yield _param_of(name, "over the vocabulary", lambda facts: [1, facts.vocab_size])
        yield BadInput(f"{name} -1 as a varint", _PARAMS + name, _raw(bytes_field(6, bytes_field(_PARAM_NUMBERS[name], varint(-1)))), field=_PARAMS + name)
    yield _param_of("stop_token_ids", "one over the limit", lambda facts: [1] * (facts.limits.max_stop_token_ids + 1))
    yield _param_of("allowed_token_ids", "more than the vocabulary", lambda facts: [1] * (facts.vocab_size + 1))
    yield _param_of("logit_bias", "of a token over the vocabulary", lambda facts: {facts.vocab_size: 1.0})
    yield _param_of("logit_bias", "one over the limit", lambda facts: dict.fromkeys(range(facts.limits.max_logit_biases + 1), 1.0))
    yield from _runs()


def _runs() -> Iterator[BadInput]:
    def row(what: str, build: Callable[[Facts], Sequence[Sequence[int]]]) -> BadInput:
        return _param_of("bad_words_ids", what, lambda facts: [TokenIds(ids=run) for run in build(facts)], about="bad_words_ids.ids")

    yield row("over the vocabulary", lambda facts: [[1], [facts.vocab_size]])
    yield row("empty run", lambda _: [[1], []])
    yield row("too long a run", lambda facts: [[1] * (facts.limits.max_bad_word_tokens + 1)])
    yield row("one over the limit", lambda facts: [[1]] * (facts.limits.max_bad_words_ids + 1))


def _chat(*turns: tuple[str, str]) -> ChatMessages:
    return ChatMessages(messages=[ChatMessage(role=role, content=content) for role, content in turns])


def _prompts() -> Iterator[BadInput]:
    yield BadInput("no input", "text", lambda _: Request(sampling_params=SamplingParams(max_tokens=1)).SerializeToString(), field="input")
    yield BadInput("an empty message", "text", lambda _: b"", field="input")
    yield BadInput("empty text", "text", _always(text=""), field="text")
    yield BadInput("text of more characters than the context can hold", "text", _text_over_all, field="text")
    yield BadInput("text of more tokens than the context", "text", _made(lambda f: {"text": "a b " * f.max_model_len}), field="text", light=False)
    yield BadInput("text of 31 MiB", "text", lambda _: bytes_field(_NUMBERS["text"], b"x" * (31 * _MIB)), field="text", light=False)
    yield BadInput("no token ids", "token_ids.ids", _always(token_ids=TokenIds()), field="token_ids.ids")
    yield _ids("over the context", lambda facts: [1] * (facts.max_model_len + 1))
    yield _ids("that fill the context", lambda facts: [1] * facts.max_model_len)
    yield _ids("over the vocabulary", lambda facts: [1, facts.vocab_size])
    negative = bytes_field(_NUMBERS["token_ids"], bytes_field(1, varint(1) + varint(-1)))
    yield BadInput("token ids of -1 as a varint", "token_ids.ids", lambda _: negative, field="token_ids.ids")
    for path in ("token_ids.ids", "output_token_ids", "sampling_params.stop_token_ids", "sampling_params.bad_words_ids.ids"):
        cut = _raw(_nested(path, bytes_field(_number_of(path), varint(2**32 + 1))))  # protobuf alone makes a 1 of it
        yield BadInput(f"{path} of 2^32 + 1", path, cut, field=path)
    key = varint_field(1, 2**32 + 1) + bytes((2 << 3 | 5,)) + bytes(4)
    bias = _raw(_nested("sampling_params.logit_bias", bytes_field(_number_of("sampling_params.logit_bias"), key)))
    yield BadInput("logit_bias of token 2^32 + 1", "sampling_params.logit_bias", bias, field="sampling_params.logit_bias.key")
    many = bytes_field(_NUMBERS["token_ids"], bytes_field(1, b"\x01" * (8 * _MIB)))
    yield BadInput("8 million token ids", "token_ids.ids", lambda _: many, field="token_ids", light=False)
    yield BadInput("no turns", "chat.messages.role", _always(chat=_chat()), field="chat.messages")
    yield BadInput(
        "too many turns", "chat.messages.role", _made(lambda f: {"chat": _chat(*[("user", "x")] * (f.limits.max_messages + 1))}), field="chat.messages"
    )
    yield BadInput("chat of more characters than the context can hold", "chat.messages.content", _chat_over_all, field="chat.messages")
    for role in ("wizard", "", "User"):
        chat = _chat(("user", "x"), (role, "y"))
        yield BadInput(f"chat role {role!r}", "chat.messages.role", _always(chat=chat), field="chat.messages[1].role")


def _ids(what: str, build: Callable[[Facts], Sequence[int]]) -> BadInput:
    return BadInput(f"token ids {what}", "token_ids.ids", _made(lambda facts: {"token_ids": TokenIds(ids=build(facts))}), field="token_ids.ids")


def _over_all(facts: Facts) -> str:
    return "x" * (facts.max_model_len * facts.longest_token_chars + 1)


def _text_over_all(facts: Facts) -> bytes:
    return _made(lambda _: {"text": _over_all(facts)})(facts)


def _chat_over_all(facts: Facts) -> bytes:
    return _made(lambda _: {"chat": _chat(("user", _over_all(facts)))})(facts)


def _names() -> Iterator[BadInput]:
    yield BadInput("unknown model", "model", _always(model="gpt-17"), Code.NOT_FOUND, reason="MODEL_NOT_FOUND")
    yield BadInput("model of a megabyte", "model", _always(model="m" * _MIB), Code.NOT_FOUND, reason="MODEL_NOT_FOUND")
    for what, value in (("with a space", "a b"), ("with a line end", "a\n"), ("too long", "a" * 129), ("with a NUL", "a\0b"), ("not ASCII", "é")):
        yield BadInput(f"request id {what}", "request_id", _always(request_id=value), field="request_id")
    yield BadInput(
        "request id in flight",
        "request_id",
        _always(request_id="twice"),
        Code.ALREADY_EXISTS,
        reason="ALREADY_EXISTS",
        meanwhile=_made(lambda f: {"request_id": "twice", "token_ids": TokenIds(ids=[1]), "max_tokens": f.max_model_len - 1, "ignore_eos": True}),
    )


def _resumes() -> Iterator[BadInput]:
    def row(what: str, build: Callable[[Facts], dict[str, Any]]) -> BadInput:
        return BadInput(f"output_token_ids {what}", "output_token_ids", _made(build), field="output_token_ids")

    yield row("over the context", lambda facts: {"output_token_ids": [1] * (facts.max_model_len + 1)})
    yield row("over max_tokens", lambda _: {"output_token_ids": [1, 1], "max_tokens": 1})
    yield row("over the vocabulary", lambda facts: {"output_token_ids": [facts.vocab_size], "max_tokens": 4})
    yield row("with n above 1", lambda _: {"output_token_ids": [1], "max_tokens": 4, "n": 2})


def _nested(path: str, raw: bytes) -> bytes:
    """Bytes of the message that holds the last part of `path`, wrapped as the parts before it say."""
    while "." in path:
        path = path.rpartition(".")[0]
        raw = bytes_field(_number_of(path), raw)
    return raw


def _number_of(path: str) -> int:
    message: Any = Request.DESCRIPTOR
    *outer, name = path.split(".")
    for each in outer:
        message = message.fields_by_name[each].message_type
    number: int = message.fields_by_name[name].number
    return number


def _not_utf8() -> Iterator[BadInput]:
    texts = ("request_id", "model", "text", "chat.messages.role", "chat.messages.content", "sampling_params.stop", "sampling_params.bad_words")
    for path in texts:
        for what, raw in (("bytes at random", b"a\xff\xc3("), ("a lone surrogate", b"\xed\xa0\x80"), ("a cut character", b"\xf0\x9f\x8e")):
            yield BadInput(f"{path} of {what}", path, _raw(_nested(path, bytes_field(_number_of(path), raw))), field=path)


def _unknown_fields() -> Iterator[BadInput]:
    """Each field with a wire type that is not its own, and fields that are only between services."""
    for path in leaf_paths(Request.DESCRIPTOR):
        yield BadInput(f"{path} of another type", path, _raw(_nested(path, fixed64_field(_number_of(path)))), field=path)
    for what, number, raw in (
        ("prefill instance", 107, b"p0"),
        ("prefill address", 42, b"10.0.0.1:50051"),
        ("hold", 1000, b"0123456789abcdef"),
        ("tenant salt", 99, b"other"),
    ):
        yield BadInput(f"smuggled {what}", "", _raw(bytes_field(number, raw)), field=str(number))
    for path in ("sampling_params.", "token_ids.", "chat.", "chat.messages.", "sampling_params.bad_words_ids."):
        yield BadInput(f"smuggled into {path}", "", _raw(_nested(path, varint_field(77, 1))), field=f"{path}77")


def _messages() -> Iterator[BadInput]:
    of_decode = decode_pb2.DecodeServiceGenerateRequest(request_id="r", prompt_token_ids=[1, 2], prefill_instance="p0")
    of_prefill = prefill_pb2.PrefillRequest(start=prefill_pb2.PrefillStart(request_id="r", prompt_token_ids=[1], pairing_id="x", transport="inline"))
    whole = _request(text="x" * 100).SerializeToString()
    yield BadInput("a cut message", "", lambda _: whole[:50], field="request")
    yield BadInput("bytes at random", "", lambda _: bytes(range(255, 0, -1)), field=None)
    yield BadInput("a message of the decode service", "", lambda _: of_decode.SerializeToString(), field="priority")
    yield BadInput("a message of the prefill service", "", lambda _: of_prefill.SerializeToString(), field=None)
    yield BadInput("a message over the limit of bytes", "", lambda _: b"\n" * (33 * _MIB), Code.RESOURCE_EXHAUSTED, reason=None, light=False)
    yield BadInput("a whole request unset", "", lambda _: b"", field="request", path=GENERATE_UNARY)
    yield BadInput("a whole request cut", "", lambda _: bytes_field(1, whole)[:50], field="request", path=GENERATE_UNARY)
    hot = bytes_field(1, _request(temperature=math.nan).SerializeToString())
    yield BadInput("a whole request of NaN", "", lambda _: hot, field="sampling_params.temperature", path=GENERATE_UNARY)
    more = bytes_field(1, _request().SerializeToString() + bytes_field(42, b"x"))
    yield BadInput("a whole request with more", "", lambda _: more, field="42", path=GENERATE_UNARY)
    for what, path in (
        ("an unknown method", "/tandem.v1.GatewayService/Abort"),
        ("decode's method", "/tandem.v1.DecodeService/Generate"),
        ("prefill's method", "/tandem.v1.PrefillService/ReadKv"),
        ("no method", "/"),
    ):
        yield BadInput(what, "", _always(), Code.UNIMPLEMENTED, reason=None, path=path)
    yield BadInput("a deadline that has passed", "", _always(), Code.DEADLINE_EXCEEDED, reason=None, timeout_s=0.0)


BAD_INPUTS: tuple[BadInput, ...] = (
    *_prompts(),
    *_names(),
    *_floats(),
    *_integers(),
    *_collections(),
    *_resumes(),
    *_not_utf8(),
    *_unknown_fields(),
    *_messages(),
)


@dataclass(frozen=True, slots=True)
class OddInput:
    """A request that must be served, whatever text is put into it: that text stays text."""

    name: str
    build: Callable[[str], Request]


def _odd(name: str, build: Callable[[str], dict[str, Any]]) -> OddInput:
    return OddInput(name, lambda text: _request(echo=True, **build(text)))


ODD_INPUTS: tuple[OddInput, ...] = (
    _odd("text", lambda text: {"text": text}),
    _odd("what a user says", lambda text: {"chat": _chat(("user", text))}),
    _odd("what the system says", lambda text: {"chat": _chat(("system", text), ("user", "x"))}),
    _odd("what the assistant has said", lambda text: {"chat": _chat(("user", "x"), ("assistant", text), ("user", "y"))}),
    _odd("a stop string", lambda text: {"stop": [text]}),
    _odd("bad words", lambda text: {"bad_words": [text]}),
)
