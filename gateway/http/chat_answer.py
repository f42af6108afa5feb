"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.http.asked import Json
from gateway.http.common_fields import Common
from gateway.http.envelope import Envelope, UsageTally, finish_of
from gateway.http.prompt_logprobs import prompt_logprobs
from gateway.http.token_text import TokenText
from gateway.vocabulary import Vocabulary
from gateway.whole_answer import WholeAnswer
from tandem.v1 import gateway_pb2, generation_pb2


class ChatAnswer:
    """See HttpAnswer. There is one prompt."""

    def __init__(self, envelope: Envelope, common: Common, vocabulary: Vocabulary) -> None:
        self._envelope = envelope
        self._chunks = replace(envelope, kind=f"{envelope.kind}.chunk")
        self._common = common
        self._tokens = TokenText(vocabulary)
        self._usage = UsageTally()
        self._whole = WholeAnswer()
        self._begun = set[int]()
        """Samples whose first chunk has gone out."""
        self._prompt_logprobs: list[generation_pb2.TokenLogprob] = []
        self._seed: int | None = None

    def take(self, prompt: int, response: gateway_pb2.GenerateResponse) -> list[Json]:
        """See HttpAnswer. A sample's first chunk has the role alone."""
        self._usage.take(prompt, response)
        if response.HasField("seed"):
            self._seed = response.seed
        if not self._common.stream:
            self._whole.take(response)
            return []
        if response.prompt_logprobs:
            self._prompt_logprobs.extend(response.prompt_logprobs)
            return []
        chunks = []
        if response.index not in self._begun:
            self._begun.add(response.index)
            chunks.append(self._first(response.index))
        choice: Json = {"index": response.index, "delta": {"content": response.text}, "logprobs": self._logprobs(response.logprobs)}
        if self._common.return_token_ids:
            choice["token_ids"] = list(response.token_ids)
        chunks.append(self._chunk(choice | finish_of(response)))
        return chunks

    def last(self) -> list[Json]:
        """See HttpAnswer."""
        return [self._chunks.around([], usage=self._usage.usage())] if self._common.stream and self._common.include_usage else []

    def whole(self) -> Json:
        """See HttpAnswer."""
        response = self._whole.response()
        more: Json = {"seed": self._seed}
        if response.prompt_logprobs:
            more["prompt_logprobs"] = prompt_logprobs(response.prompt_logprobs, self._tokens)
        return self._envelope.around([self._choice(each) for each in response.choices], usage=self._usage.usage(), **more)

    def _choice(self, each: gateway_pb2.Choice) -> Json:
        message = {"role": "assistant", "content": each.text, "refusal": None}
        choice: Json = {"index": each.index, "message": message, "logprobs": self._logprobs(each.logprobs)}
        if self._common.return_token_ids:
            choice["token_ids"] = list(each.token_ids)
        return choice | finish_of(each)

    def _first(self, index: int) -> Json:
        choice: Json = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        more: Json = {"seed": self._seed}
        if self._prompt_logprobs and index == 0:
            more["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs, self._tokens)
        return self._chunk(choice, **more)

    def _chunk(self, choice: Json, **more: object) -> Json:
        usage = self._usage.usage() if self._common.continuous_usage else None
        told: Json = {"usage": usage} if self._common.include_usage or usage else {}
        return self._chunks.around([choice], **told, **more)

    def _logprobs(self, entries: Sequence[generation_pb2.TokenLogprob]) -> Json | None:
        if not entries:
            return None
        content = [
            self._named(entry.token_id, entry.logprob) | {"top_logprobs": [self._named(top.token_id, top.logprob) for top in entry.top_logprobs]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _named(self, token_id: int, logprob: float) -> Json:
        return {"token": self._tokens.text_of(token_id), "logprob": logprob, "bytes": list(self._tokens.bytes_of(token_id))}
