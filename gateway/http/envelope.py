"""What is around the choices of an answer: id, object, time, model, usage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc

from gateway.http.asked import Json
from rpc.errors import StatusError
from tandem.v1 import gateway_pb2, generation_pb2

_FINISH = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """One answer's, the same around all of its chunks."""

    id: str
    kind: str
    """OpenAI's name of the object."""
    created: int
    """Unix time in seconds."""
    model: str

    def around(self, choices: list[Json], **more: Any) -> Json:
        """The whole object."""
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices, **more}


@dataclass(slots=True)
class UsageTally:
    """Tokens of all prompts and samples of an answer, so far and in the end."""

    prompt: dict[int, int] = field(default_factory=dict)
    """By prompt."""
    completion: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    def take(self, prompt: int, response: gateway_pb2.GenerateResponse) -> None:
        """Counts a message, and corrects the count by what the last one says."""
        if response.prompt_tokens:
            self.prompt[prompt] = response.prompt_tokens
        self.completion[prompt] = self.completion.get(prompt, 0) + len(response.token_ids)
        if response.HasField("usage"):
            usage = response.usage
            self.prompt[prompt], self.completion[prompt], self.cached[prompt] = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens

    def usage(self) -> Json:
        """OpenAI's usage object."""
        prompt, completion = sum(self.prompt.values()), sum(self.completion.values())
        details = {"cached_tokens": sum(self.cached.values())}
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, "prompt_tokens_details": details}


def finish_of(choice: gateway_pb2.GenerateResponse | gateway_pb2.Choice) -> Json:
    """finish_reason, and with vLLM what matched; both null while a sample goes on. Raises StatusError ABORTED for one that the server gave up."""
    if not choice.HasField("finish"):
        return {"finish_reason": None, "stop_reason": None}
    finish = choice.finish
    if finish.finish_reason not in _FINISH:
        raise StatusError(grpc.StatusCode.ABORTED, "the server gave the sample up", reason="SAMPLE_ABORTED")
    matched = finish.WhichOneof("matched_stop")
    return {"finish_reason": _FINISH[finish.finish_reason], "stop_reason": getattr(finish, matched) if matched else None}
