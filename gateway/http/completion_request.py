"""The body of /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from gateway.http.asked import Asked
from gateway.http.common_fields import MAX_PROMPTS, read_common
from gateway.http.completion_answer import CompletionAnswer
from gateway.http.envelope import Envelope
from gateway.http.json_body import Body, read_body, shown, sound_text, token_ids
from gateway.http.sampling_fields import read_sampling
from gateway.limits import RequestLimits
from gateway.served_model import ServedModel
from rpc.errors import invalid_argument
from tandem.v1 import gateway_pb2

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's; null asks for as many as the context has room for, as in vLLM."""


def completion_request(raw: bytes, model: ServedModel, limits: RequestLimits, *, request_id: str) -> Asked:
    """Checks the shape; ranges and lengths are the core's to check. Raises StatusError that names the field."""
    body = read_body(raw)
    common = read_common(body, request_id)
    prompts = _prompts(body, model.max_model_len)
    params = read_sampling(body)
    if (best_of := body.integer("best_of")) is not None and best_of != (params.n or 1):
        raise body.wrong("best_of", f"must be n ({params.n or 1}) or left out, is {best_of}")
    if "max_tokens" not in body:
        params.max_tokens = _DEFAULT_MAX_TOKENS
    if (max_tokens := body.integer("max_tokens")) is not None:
        params.max_tokens = max_tokens
    echo = bool(body.flag("echo"))
    tells_prompt = params.HasField("prompt_logprobs")
    if (logprobs := body.integer("logprobs")) is not None:
        params.logprobs = logprobs
        if echo and not tells_prompt:
            params.prompt_logprobs = logprobs
    body.only("suffix", "")
    body.only("add_special_tokens", True)
    body.end()
    many = len(prompts) > 1
    requests = tuple(
        gateway_pb2.GenerateRequest(
            request_id=f"{common.request_id}-{index}" if many else common.request_id,
            model=common.model,
            sampling_params=params,
            priority=common.priority,
            echo=echo,
            **prompt,
        )
        for index, prompt in enumerate(prompts)
    )
    envelope = Envelope(f"cmpl-{common.request_id}", "text_completion", int(time.time()), model.name)
    answer = CompletionAnswer(
        envelope,
        common,
        model.tokenizer.vocabulary,
        num_prompts=len(prompts),
        num_samples=params.n or 1,
        echoes_logprobs=echo and logprobs is not None,
        tells_prompt=tells_prompt,
    )
    return Asked(requests, common.stream, answer)


def _prompts(body: Body, max_tokens: int) -> list[dict[str, Any]]:
    """Each as the field of GenerateRequest that it is."""
    value = body.take("prompt")
    if value is None:
        raise body.wrong("prompt", "must be given")
    if isinstance(value, str):
        return [{"text": sound_text(value, "prompt")}]
    if not isinstance(value, list):
        raise body.wrong("prompt", f"must be a string, a list of strings, token ids or a list of lists of them, is {shown(value)}")
    if not value:
        raise body.wrong("prompt", "must not be empty")
    if type(value[0]) is int:
        return [_prompt(value, "prompt", max_tokens)]
    if len(value) > MAX_PROMPTS:
        raise body.wrong("prompt", f"must be at most {MAX_PROMPTS} prompts, is {len(value)}")
    return [_prompt(each, f"prompt[{index}]", max_tokens) for index, each in enumerate(value)]


def _prompt(value: object, field: str, max_tokens: int) -> dict[str, Any]:
    if isinstance(value, list):
        if len(value) > max_tokens:  # the core's to say, but by then each would have been looked at and copied
            raise invalid_argument(field, f"is {len(value)} tokens, above the context of {max_tokens}")
        return {"token_ids": {"ids": token_ids(value, field, max_tokens)}}
    return {"text": sound_text(value, field)}
