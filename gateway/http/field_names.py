"""The core speaks of fields as the gRPC messages name them; an HTTP client knows OpenAI's names."""

from __future__ import annotations

import re

_CHAT = re.compile(r"^chat\.messages")
_PROMPT = re.compile(r"^(text|token_ids(\.ids)?|input)(?=$|\[)")


def openai_field(field: str) -> str:
    """The name in the HTTP body of a field of GenerateRequest: prompt, messages[2].role, top_p."""
    name = field.removeprefix("request.").removeprefix("sampling_params.")
    return _PROMPT.sub("prompt", _CHAT.sub("messages", name))


def openai_message(message: str, field: str) -> str:
    """An error's text, which begins with its field, with that renamed."""
    return openai_field(field) + message.removeprefix(field) if field and message.startswith(field) else message
