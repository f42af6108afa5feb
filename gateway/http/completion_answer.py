"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.http.asked import Json
from gateway.http.common_fields import Common
from gateway.http.envelope import Envelope, UsageTally, finish_of
from gateway.http.prompt_logprobs import prompt_logprobs
from gateway.http.token_text import TokenText
from gateway.vocabulary import Vocabulary
from gateway.whole_answer import Room, WholeAnswer
from tandem.v1 import gateway_pb2, generation_pb2

Logprobs = Sequence[generation_pb2.TokenLogprob]


@dataclass(slots=True)
class _Prompt:
    """What was told of a prompt in front of its first text."""

    logprobs: list[generation_pb2.TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    """Samples whose first chunk has gone out."""


class CompletionAnswer:
    """See HttpAnswer. Sample s of prompt p is choice p * n + s."""

    def __init__(
        self, envelope: Envelope, common: Common, vocabulary: Vocabulary, *, num_prompts: int, num_samples: int, echoes_logprobs: bool, tells_prompt: bool
    ) -> None:
        """echoes_logprobs: those of the prompt stand in front of each choice's own. tells_prompt: they come by themselves, in vLLM's shape."""
        self._envelope = envelope
        self._common = common
        self._tokens = TokenText(vocabulary)
        self._num_samples = num_samples
        self._echoes_logprobs = echoes_logprobs
        self._tells_prompt = tells_prompt
        self._usage = UsageTally()
        room = Room()
        self._whole = [WholeAnswer(room) for _ in range(0 if common.stream else num_prompts)]
        self._prompts = [_Prompt() for _ in range(num_prompts)]
        self._num_chars: dict[int, int] = {}
        """Of each choice's tokens so far, for text_offset."""
        self._seed: int | None = None

    def take(self, prompt: int, response: gateway_pb2.GenerateResponse) -> list[Json]:
        """See HttpAnswer."""
        self._usage.take(prompt, response)
        if response.HasField("seed") and self._seed is None:
            self._seed = response.seed
        if not self._common.stream:
            self._whole[prompt].take(response)
            return []
        state = self._prompts[prompt]
        state.token_ids.extend(response.prompt_token_ids)
        if response.prompt_logprobs:
            state.logprobs.extend(response.prompt_logprobs)
            return []
        first = response.index not in state.begun
        state.begun.add(response.index)
        index = prompt * self._num_samples + response.index
        choice = self._choice(index, response.text, response.token_ids, response.logprobs, state if first else None)
        usage = self._usage.usage() if self._common.continuous_usage else None
        return [self._envelope.around([choice | finish_of(response)], **self._more(usage, first=first))]

    def last(self) -> list[Json]:
        """See HttpAnswer."""
        return [self._envelope.around([], usage=self._usage.usage())] if self._common.stream and self._common.include_usage else []

    def whole(self) -> Json:
        """See HttpAnswer."""
        choices = [self._whole_choice(prompt, answer.response()) for prompt, answer in enumerate(self._whole)]
        return self._envelope.around([choice for each in choices for choice in each], usage=self._usage.usage(), seed=self._seed)

    def _whole_choice(self, prompt: int, response: gateway_pb2.GenerateUnaryResponse) -> list[Json]:
        told = _Prompt(list(response.prompt_logprobs), list(response.prompt_token_ids))
        return [
            self._choice(prompt * self._num_samples + each.index, each.text, each.token_ids, each.logprobs, told) | finish_of(each) for each in response.choices
        ]

    def _more(self, usage: Json | None, *, first: bool) -> Json:
        more: Json = {"usage": usage} if self._common.include_usage or usage else {}
        return more | ({"seed": self._seed} if first else {})

    def _choice(self, index: int, text: str, token_ids: Sequence[int], logprobs: Logprobs, told: _Prompt | None) -> Json:
        """`told` with the choice's first text alone."""
        choice: Json = {"index": index, "text": text, "logprobs": None}
        entries: list[generation_pb2.TokenLogprob | None] = list(logprobs)
        ids = list(token_ids)
        if told and self._echoes_logprobs:
            # The first token of a prompt has no probability: nothing is in front of it.
            ids, entries = [*told.token_ids, *ids], [None, *told.logprobs, *entries]
        if told and self._tells_prompt:
            choice["prompt_logprobs"] = prompt_logprobs(told.logprobs, self._tokens)
        if entries:
            choice["logprobs"] = self._logprobs(index, ids, entries)
        if self._common.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if told and told.token_ids:
                choice["prompt_token_ids"] = told.token_ids
        return choice

    def _logprobs(self, index: int, ids: Sequence[int], entries: Sequence[generation_pb2.TokenLogprob | None]) -> Json:
        names, offsets, position = [], [], self._num_chars.get(index, 0)
        for token_id in ids:
            names.append(self._tokens.name_of(token_id))
            offsets.append(position)
            position += len(self._tokens.text_of(token_id))
        self._num_chars[index] = position
        return {
            "tokens": names,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: generation_pb2.TokenLogprob) -> dict[str, float]:
        """By name; where two tokens have one, the likelier one stays."""
        found: dict[str, float] = {}
        for top in entry.top_logprobs:
            found.setdefault(self._tokens.name_of(top.token_id), top.logprob)
        found.setdefault(self._tokens.name_of(entry.token_id), entry.logprob)
        return found
