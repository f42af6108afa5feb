"""The body of /v1/chat/completions."""

from __future__ import annotations

import time

from gateway.http.asked import Asked
from gateway.http.chat_answer import ChatAnswer
from gateway.http.common_fields import read_common
from gateway.http.envelope import Envelope
from gateway.http.json_body import Body, read_body, shown
from gateway.http.sampling_fields import read_sampling
from gateway.limits import RequestLimits
from gateway.served_model import ServedModel
from tandem.v1 import gateway_pb2, generation_pb2

_NOT_SERVED = (
    "functions",
    "function_call",
    "reasoning_effort",
    "reasoning",
    "verbosity",
    "modalities",
    "audio",
    "prediction",
    "web_search_options",
    "chat_template",
    "documents",
    "mm_processor_kwargs",
)
_NOT_SERVED_OF_MESSAGES = ("name", "tool_call_id", "function_call", "audio", "refusal", "reasoning", "reasoning_content")


def chat_request(raw: bytes, model: ServedModel, limits: RequestLimits, *, request_id: str) -> Asked:
    """Checks the shape; ranges and lengths are the core's to check. Raises StatusError that names the field."""
    body = read_body(raw)
    common = read_common(body, request_id)
    messages = _messages(body, limits)
    params = read_sampling(body)
    _read_max_tokens(body, params)
    _read_logprobs(body, params, limits)
    _refuse_tools(body)
    for name in _NOT_SERVED:
        body.only(name)
    body.only("chat_template_kwargs", {})
    body.only("add_generation_prompt", True)
    body.only("add_special_tokens", False)  # the template writes them
    body.only("continue_final_message", False)
    body.only("echo", False)
    body.end()
    request = gateway_pb2.GenerateRequest(
        request_id=common.request_id, model=common.model, chat=gateway_pb2.ChatMessages(messages=messages), sampling_params=params, priority=common.priority
    )
    envelope = Envelope(f"chatcmpl-{common.request_id}", "chat.completion", int(time.time()), model.name)
    return Asked((request,), common.stream, ChatAnswer(envelope, common, model.tokenizer.vocabulary))


def _read_max_tokens(body: Body, params: generation_pb2.SamplingParams) -> None:
    old, new = body.integer("max_tokens"), body.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise body.wrong("max_tokens", f"is {old}, and max_completion_tokens {new}: they mean the same")
    wanted = new if old is None else old
    if wanted is not None:
        params.max_tokens = wanted


def _read_logprobs(body: Body, params: generation_pb2.SamplingParams, limits: RequestLimits) -> None:
    # The core has one name for both, which is the flag's: the number is checked here.
    wanted, num_top = body.flag("logprobs"), body.integer("top_logprobs", 0, limits.max_logprobs)
    if num_top and not wanted:
        raise body.wrong("top_logprobs", "may only be given with logprobs true")
    if wanted:
        params.logprobs = num_top or 0


def _refuse_tools(body: Body) -> None:
    """Without tools there is nothing to choose, and what says so says nothing."""
    body.only("tools", [])
    body.only("tool_choice", "none", "auto")
    body.only("parallel_tool_calls", True, False)


def _messages(body: Body, limits: RequestLimits) -> list[gateway_pb2.ChatMessage]:
    value = body.take("messages")
    if not isinstance(value, list):
        raise body.wrong("messages", "must be given" if value is None else f"must be a list of messages, is {shown(value)}")
    if len(value) > limits.max_messages:
        raise body.wrong("messages", f"must be at most {limits.max_messages} messages, is {len(value)}")
    return [_message(each, index, body) for index, each in enumerate(value)]


def _message(value: object, index: int, body: Body) -> gateway_pb2.ChatMessage:
    if not isinstance(value, dict):
        raise body.wrong(f"messages[{index}]", f"must be an object, is {shown(value)}")
    message = Body(value, f"messages[{index}].")
    role = message.text("role")
    if role is None:
        raise message.wrong("role", "must be given")
    content = _content(message, index)
    for name in _NOT_SERVED_OF_MESSAGES:
        message.only(name)
    message.only("tool_calls", [])
    message.end()
    return gateway_pb2.ChatMessage(role=role, content=content)


def _content(message: Body, index: int) -> str:
    """A string, or parts of text one behind the other."""
    parts = message.take("content")
    if not isinstance(parts, list):
        text = Body({"content": parts}, f"messages[{index}].").text("content")
        if text is None:
            raise message.wrong("content", "must be given")
        return text
    return "".join(_part(part, place, message, index) for place, part in enumerate(parts))


def _part(value: object, place: int, message: Body, index: int) -> str:
    if not isinstance(value, dict):
        raise message.wrong(f"content[{place}]", f"must be an object, is {shown(value)}")
    part = Body(value, f"messages[{index}].content[{place}].")
    kind = part.text("type")
    if kind != "text":
        raise part.wrong("type", "must be given" if kind is None else f"must be text, is {shown(kind)}: no other content is supported")
    text = part.text("text")
    if text is None:
        raise part.wrong("text", "must be given")
    part.end()
    return text
