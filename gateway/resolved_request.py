"""A request with every parameter in force."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.limits import RequestLimits
from gateway.sampling_checks import SamplingParams, end_token_ids, min_tokens_problem, raise_if
from gateway.served_model import ServedModel
from rpc.errors import invalid_argument
from tandem.v1 import gateway_pb2

_INPUT_FIELDS = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
_STAYS_HERE = ("stop", "include_stop_str_in_output", "skip_special_tokens", "bad_words")
"""Parameters of text, which decode knows nothing of."""


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request whose every parameter is in force; nothing is absent."""

    request_id: str
    tenant: str
    priority: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    """Tokens of a resume."""
    max_tokens: int
    min_tokens: int
    n: int
    seed: int
    stop: Sequence[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    stop_token_ids: frozenset[int]
    """All that end the sequence, the model's own unless they are ignored."""
    echo: bool
    """Begin each sample's text with the prompt's, unless it is resumed, and tell the prompt's token ids."""
    sampling_params: SamplingParams
    """What decode is told: seed and max_tokens set, the model's defaults where the client left a field out, parameters of text left out."""

    @property
    def num_prompt_logprobs(self) -> int:
        """Entries that decode will send."""
        return len(self.prompt_token_ids) - 1 if self.sampling_params.HasField("prompt_logprobs") else 0


def resolve(
    request: gateway_pb2.GenerateRequest,
    prompt_token_ids: Sequence[int],
    bad_words_ids: Sequence[Sequence[int]],
    model: ServedModel,
    limits: RequestLimits,
    *,
    tenant: str,
    request_id: str,
    max_model_len: int,
) -> ResolvedRequest:
    """Puts defaults in and checks lengths; `max_model_len` is the pools' or the model's, whichever is shorter. Raises StatusError.

    `bad_words_ids` are those of `bad_words`, in addition to the request's own.
    """
    given = request.sampling_params
    max_tokens = _max_tokens(request, len(prompt_token_ids), model, limits, max_model_len)
    raise_if("sampling_params.min_tokens", min_tokens_problem(given.min_tokens, max_tokens))
    seed = given.seed if given.HasField("seed") else secrets.randbits(64)
    sent = SamplingParams()
    sent.CopyFrom(given)
    for name in _STAYS_HERE:
        sent.ClearField(name)
    sent.max_tokens, sent.seed = max_tokens, seed
    for name, value in model.defaults.sampling.items():
        if not sent.HasField(name):
            setattr(sent, name, value)
    for run in bad_words_ids:
        sent.bad_words_ids.add(ids=run)
    if request.output_token_ids:
        sent.ClearField("prompt_logprobs")  # the stream that is resumed has told them, in front of its first token
    return ResolvedRequest(
        request_id=request_id,
        tenant=tenant,
        priority=request.priority,
        prompt_token_ids=prompt_token_ids,
        output_token_ids=request.output_token_ids,
        max_tokens=max_tokens,
        min_tokens=given.min_tokens,
        n=given.n if given.HasField("n") else 1,
        seed=seed,
        stop=tuple(given.stop),
        include_stop_str_in_output=given.include_stop_str_in_output,
        skip_special_tokens=given.skip_special_tokens if given.HasField("skip_special_tokens") else True,
        stop_token_ids=end_token_ids(given, model),
        echo=request.echo,
        sampling_params=sent,
    )


def _max_tokens(request: gateway_pb2.GenerateRequest, num_prompt: int, model: ServedModel, limits: RequestLimits, max_model_len: int) -> int:
    """max_tokens in force: the client's, else the smallest of the model's default, max_new_tokens and what the context leaves. Raises StatusError."""
    given, field = request.sampling_params, _INPUT_FIELDS[request.WhichOneof("input") or "text"]
    left = max_model_len - num_prompt
    if num_prompt == 0:
        raise invalid_argument(field, "has no tokens")
    if left < 1:
        raise invalid_argument(field, f"is {num_prompt} tokens; with at least one token of output the context of {max_model_len} is too short")
    if given.HasField("max_tokens") and given.max_tokens > left:
        described = f"is {given.max_tokens}; with {num_prompt} prompt tokens the context of {max_model_len} leaves {left}"
        raise invalid_argument("sampling_params.max_tokens", described)
    default = min(left, limits.max_new_tokens or left, model.defaults.max_tokens or left)
    max_tokens = given.max_tokens if given.HasField("max_tokens") else default
    if len(request.output_token_ids) > max_tokens:
        raise invalid_argument("output_token_ids", f"is {len(request.output_token_ids)} tokens, above max_tokens {max_tokens}")
    return max_tokens
