"""Text to token ids, off the event loop when the text is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer

from gateway.chat_encoder import ChatEncoder
from gateway.chat_template import ChatTemplate, ChatTemplateError
from gateway.prompt_ids import prompt_ids
from gateway.vocabulary import Vocabulary

LONG_TEXT_CHARS = 2_000
"""Texts up to this length are encoded on the event loop: that takes about a millisecond, less than a change of threads under load may."""
_TURN_CHARS = 20
"""A turn without content takes the template and the tokenizer about as long as this many characters."""
T = TypeVar("T")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextTokenizer:
    """A model's tokenizer and chat template. Encoding is pure and safe in any thread; threads beyond `num_threads` wait.

    A prompt of more than `max_tokens`, where that is given, raises TooManyTokensError.
    """

    def __init__(self, backend: Tokenizer, chat_template: ChatTemplate | None, *, num_threads: int = 2) -> None:
        self.backend = backend
        self.vocabulary = Vocabulary.of(backend)
        self._chat = ChatEncoder(backend, chat_template) if chat_template is not None else None
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    def encode_text(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Ids of a plain prompt, with the beginning-of-sequence token where the model has one."""
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=True)
        return prompt_ids(encoding, max_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int | None = None) -> list[int]:
        """Ids of a conversation up to the assistant's turn. Raises ChatTemplateError."""
        if self._chat is None:
            raise ChatTemplateError("the model has no chat template")
        return self._chat.encode(messages, max_tokens=max_tokens)

    async def encode_text_async(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """`encode_text` that leaves the event loop free."""
        return await self.off_the_loop(len(text), lambda: self.encode_text(text, max_tokens=max_tokens))

    async def encode_chat_async(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int | None = None) -> list[int]:
        """`encode_chat` that leaves the event loop free."""
        num_chars = sum(_TURN_CHARS + len(message["content"]) for message in messages)
        return await self.off_the_loop(num_chars, lambda: self.encode_chat(messages, max_tokens=max_tokens))

    def close(self) -> None:
        """Lets no new work in; threads end with what they are doing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def off_the_loop(self, num_chars: int, work: Callable[[], T]) -> T:
        """Runs `work` here when it is short, in a thread when it is as long as a long text."""
        if num_chars <= LONG_TEXT_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens of a tokenizer_config.json: bos_token and the like to their text."""
    named = {name: config.get(name) for name in _NAMED_TOKENS}
    return {name: str(token["content"] if isinstance(token, Mapping) else token) for name, token in named.items() if token is not None}


def apply_config(backend: Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds the tokens that only the tokenizer_config.json has, as transformers does.

    What is put around a prompt is tokenizer.json's own; add_bos_token and add_eos_token of the config do not count beside it, as in transformers.
    """
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # their text stays text: a prompt that is to have control tokens comes as a chat or as token ids
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = [entry for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))]
    backend.add_tokens([_added_token(entry) for entry in listed if entry["content"] not in known])
    named = special_tokens_of(config)
    known |= {entry["content"] for entry in listed}
    backend.add_special_tokens([token for token in dict.fromkeys(named.values()) if token not in known])


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(entry["content"], **flags)
