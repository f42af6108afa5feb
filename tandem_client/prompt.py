"""A call's prompt and options as the gateway's request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tandem.v1 import gateway_pb2, generation_pb2
from tandem_client.chat import ChatMessage
from tandem_client.options import Options, Terms
from tandem_client.sampling import sampling_params


def prompt_request(prompt: str | Sequence[int], options: Options) -> gateway_pb2.GenerateRequest:
    """A completion of a text or of token ids. Raises TypeError and ValueError that name what is wrong."""
    request = _request(options)
    if isinstance(prompt, str):
        request.text = prompt
        return request
    request.token_ids.CopyFrom(_token_ids(prompt))
    return request


def chat_request(messages: Sequence[ChatMessage], options: Options) -> gateway_pb2.GenerateRequest:
    """The answer to a conversation. Raises TypeError and ValueError that name what is wrong."""
    request = _request(options)
    request.chat.SetInParent()
    for index, message in enumerate(messages):
        if set(cast("Mapping[str, object]", message)) != {"role", "content"}:
            raise TypeError(f'messages[{index}]: a turn is {{"role": ..., "content": ...}} and nothing else')
        try:
            request.chat.messages.add(role=message["role"], content=message["content"])
        except (TypeError, ValueError) as error:
            raise type(error)(f"messages[{index}]: {error}") from None
    return request


def _request(options: Options) -> gateway_pb2.GenerateRequest:
    given = {name: value for name, value in cast("dict[str, Any]", options).items() if name not in Terms.__annotations__}
    return gateway_pb2.GenerateRequest(
        request_id=options.get("request_id") or secrets.token_hex(16),
        model=options.get("model") or "",
        sampling_params=sampling_params(given),
        priority=options.get("priority") or 0,
        echo=options.get("echo") or False,
    )


def _token_ids(prompt: Any) -> generation_pb2.TokenIds:
    if prompt is None or isinstance(prompt, bytes):  # protobuf would take them for no ids, and for small ones
        raise TypeError(f"prompt: a text or a sequence of token ids is needed, not {type(prompt).__name__}")
    try:
        return generation_pb2.TokenIds(ids=prompt)
    except (TypeError, ValueError) as error:
        raise type(error)(f"prompt: {error}") from None
