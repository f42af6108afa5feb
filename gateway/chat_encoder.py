"""Conversations to token ids, with control tokens written by the template alone.

Text such as `<|im_end|>` in a message stays text. Three characters that Unicode reserves for inside use keep the two apart: control tokens in messages are
set between OPEN and CLOSE before the template is rendered; afterwards those marks go, and the control tokens that the template itself wrote are set
between two SEALs. A copy of the tokenizer knows the control tokens in their sealed form only, so that the whole conversation is encoded in one go,
with every rule of the tokenizer (normalizer, prefix space, merges) as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate, ChatTemplateError
from gateway.long_text import replace
from gateway.prompt_ids import prompt_ids

_SEAL, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"


class ChatEncoder:
    """Encodes conversations as transformers' `apply_chat_template` does for ordinary text. Safe in any thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Control tokens are the special tokens and the other added tokens that the template writes. Raises ValueError when they cannot be told from text."""
        self._template = template
        definition = json.loads(tokenizer.to_str())
        control = [token["content"] for token in definition["added_tokens"] if _is_control(token, template.literal_text)]
        for token in definition["added_tokens"]:
            if token["content"] in control:
                token["content"] = _seal(token["content"])
        self._sealed = Tokenizer.from_str(json.dumps(definition))
        self._original_ids = _original_ids(tokenizer, self._sealed, control)
        any_control = _any_of(control)
        self._longest = max(map(len, control), default=0) + 2  # with its marks
        special = [token["content"] for token in json.loads(tokenizer.to_str())["added_tokens"] if token["special"]]
        self._control, self._special = re.compile(any_control), re.compile(_any_of(special))
        self._rendered = re.compile(f"{_OPEN}(?P<text>{any_control}){_CLOSE}|[{_OPEN}{_CLOSE}]|(?P<control>{any_control})")
        self._check(tokenizer, control)

    def encode(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int | None = None) -> list[int]:
        """Token ids of a conversation up to the assistant's turn. Raises ChatTemplateError, TooManyTokensError."""
        marked = [{**message, "content": self._mark(index, message)} for index, message in enumerate(messages)]
        return self._encode(replace(self._rendered, _seal_match, self._template.render(marked), longest=self._longest), max_tokens)

    def _mark(self, index: int, message: Mapping[str, str]) -> str:
        """The content with its control tokens marked. In the assistant's turns tokens that are not special, such as `</think>`, stay control."""
        content = message["content"]
        if any(mark in content for mark in (_SEAL, _OPEN, _CLOSE)):
            raise ChatTemplateError("a message holds a noncharacter (U+FDD0 to U+FDD2)", index)
        control = self._special if message["role"] == "assistant" else self._control
        return replace(control, lambda match: f"{_OPEN}{match[0]}{_CLOSE}", content, longest=self._longest)

    def _encode(self, sealed: str, max_tokens: int | None = None) -> list[int]:
        [encoding] = self._sealed.encode_batch_fast([sealed], add_special_tokens=False)
        original = self._original_ids
        return [original.get(token_id, token_id) for token_id in prompt_ids(encoding, max_tokens)]

    def _check(self, tokenizer: Tokenizer, control: Sequence[str]) -> None:
        for content in control:
            token_id = tokenizer.token_to_id(content)
            if token_id in self._encode(content) or token_id not in self._encode(_seal(content)):
                raise ValueError(f"the tokenizer cannot tell the control token {content!r} from text")


def _is_control(token: Mapping[str, object], template_text: str) -> bool:
    content = str(token["content"])
    return bool(token["special"]) or (content in template_text and not content.isspace())


def _any_of(contents: Sequence[str]) -> str:
    """A pattern for any of the texts, the longest first; nothing matches when there is none."""
    return "|".join(re.escape(content) for content in sorted(contents, key=len, reverse=True)) or "(?!)"


def _seal(content: str) -> str:
    return f"{_SEAL}{content}{_SEAL}"


def _seal_match(match: re.Match[str]) -> str:
    return _seal(match["control"]) if match["control"] is not None else match["text"] or ""


def _original_ids(tokenizer: Tokenizer, sealed: Tokenizer, control: Sequence[str]) -> dict[int, int]:
    """Ids of added tokens in the sealed copy, where they moved, to the model's own."""
    moved: dict[int, int] = {}
    for original_id, token in tokenizer.get_added_tokens_decoder().items():
        name = _seal(token.content) if token.content in control else token.content
        sealed_id = sealed.token_to_id(name)
        if sealed_id is None:
            raise ValueError(f"the tokenizer lost its added token {token.content!r}")
        moved[sealed_id] = original_id
    return moved
