"""Every check of a request's fields, in one closed table, and the parameters as they are in force.

Nothing is ignored: what this version does not serve is refused by name. Refusals are INVALID_ARGUMENT with the field's full name.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.limits import RequestLimits
from gateway.served_model import ServedModel
from rpc.errors import invalid_argument, not_found
from tandem.v1 import gateway_pb2, generation_pb2

ROLES = ("system", "developer", "user", "assistant", "tool")
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_NOT_SERVED = "is not served by this version"

SamplingParams = generation_pb2.SamplingParams


@dataclass(frozen=True, slots=True)
class Bounds:
    """What checks compare with."""

    vocab_size: int
    limits: RequestLimits


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
    seed: int
    stop: Sequence[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    stop_token_ids: frozenset[int]
    """All that end the sequence, the model's own unless they are ignored."""
    sampling_params: SamplingParams
    """What decode is told: seed and max_tokens set, stop strings left out."""


def _number(low: float, high: float, *, open_low: bool = False) -> Callable[[float, Bounds], str | None]:
    """A finite number in [low, high], or (low, high]."""

    def check(value: float, _: Bounds) -> str | None:
        if not math.isfinite(value):
            return "must be a finite number"
        inside = low < value <= high if open_low else low <= value <= high
        return None if inside else f"must be {'above' if open_low else 'at least'} {low:g} and at most {high:g}, is {value:g}"

    return check


def _only(allowed: float) -> Callable[[float, Bounds], str | None]:
    """One value, the one without effect."""
    return lambda value, _: None if value == allowed else f"{_NOT_SERVED}: only {allowed:g} is, got {value:g}"


def _refuse(_: object, __: Bounds) -> str | None:
    return _NOT_SERVED


def _anything(_: object, __: Bounds) -> str | None:
    return None


def _top_k(value: int, _: Bounds) -> str | None:
    return None if value >= -1 else f"must be -1 or 0 (off) or above, is {value}"


def _max_tokens(value: int, bounds: Bounds) -> str | None:
    limit = bounds.limits.max_new_tokens
    return None if limit is None or value <= limit else f"must be at most max_new_tokens {limit}, is {value}"


def _logprobs(value: int, bounds: Bounds) -> str | None:
    return None if value <= bounds.limits.max_logprobs else f"must be at most {bounds.limits.max_logprobs}, is {value}"


def _n(value: int, _: Bounds) -> str | None:
    return None if value == 1 else "must be at least 1" if value == 0 else f"{_NOT_SERVED} above 1, got {value}"


def _stop(values: Sequence[str], bounds: Bounds) -> str | None:
    limits = bounds.limits
    if len(values) > limits.max_stop_strings:
        return f"must be at most {limits.max_stop_strings} strings, is {len(values)}"
    if any(not value for value in values):
        return "must not hold an empty string"
    longest = max(map(len, values), default=0)
    return None if longest <= limits.max_stop_string_chars else f"must hold strings of at most {limits.max_stop_string_chars} characters, one has {longest}"


def _stop_token_ids(values: Sequence[int], bounds: Bounds) -> str | None:
    if len(values) > bounds.limits.max_stop_token_ids:
        return f"must be at most {bounds.limits.max_stop_token_ids} token ids, is {len(values)}"
    return _token_ids(values, bounds)


def _token_ids(values: Sequence[int], bounds: Bounds) -> str | None:
    largest = max(values, default=0)
    return None if largest < bounds.vocab_size else f"must be below the vocabulary's size {bounds.vocab_size}, one is {largest}"


CHECKS: dict[str, Callable[..., str | None]] = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, open_low=True),
    "top_k": _top_k,
    "min_p": _number(0, 1),
    "max_tokens": _max_tokens,
    "min_tokens": _only(0),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "include_stop_str_in_output": _anything,
    "ignore_eos": _anything,
    "skip_special_tokens": _anything,
    "n": _n,
    "seed": _anything,
    "logprobs": _logprobs,
    "prompt_logprobs": _refuse,
    "presence_penalty": _only(0),
    "frequency_penalty": _only(0),
    "repetition_penalty": _only(1),
    "logit_bias": _refuse,
    "allowed_token_ids": _refuse,
    "bad_words": _refuse,
}
"""One check per field of SamplingParams; it sees a field that is set, and returns what is wrong with it."""


def check_request(request: gateway_pb2.GenerateRequest, model: ServedModel, limits: RequestLimits) -> None:
    """Checks everything that needs no tokenizing. Raises StatusError."""
    bounds = Bounds(model.vocab_size, limits)
    if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
        raise invalid_argument("request_id", "must be 1 to 128 letters, digits and . _ : - and begin with a letter or a digit")
    if request.model and request.model != model.name:
        raise not_found("MODEL_NOT_FOUND", f"model {request.model[:128]!r} is not served; {model.name!r} is")
    _check_input(request, model, bounds)
    _raise_if("output_token_ids", _too_many_tokens(len(request.output_token_ids), model) or _token_ids(request.output_token_ids, bounds))
    for field, value in request.sampling_params.ListFields():
        _raise_if(f"sampling_params.{field.name}", CHECKS[field.name](value, bounds))


def _check_input(request: gateway_pb2.GenerateRequest, model: ServedModel, bounds: Bounds) -> None:
    match request.WhichOneof("input"):
        case "text":
            _raise_if("text", "must not be empty" if not request.text else _too_many_chars(len(request.text), model))
        case "token_ids":
            ids = request.token_ids.ids
            _raise_if("token_ids.ids", "must not be empty" if not ids else _too_many_tokens(len(ids), model) or _token_ids(ids, bounds))
        case "chat":
            _check_messages(request.chat.messages, model, bounds)
        case _:
            raise invalid_argument("input", "must be set: text, token_ids or chat")


def _check_messages(messages: Sequence[gateway_pb2.ChatMessage], model: ServedModel, bounds: Bounds) -> None:
    if not messages:
        raise invalid_argument("chat.messages", "must not be empty")
    if len(messages) > bounds.limits.max_messages:
        raise invalid_argument("chat.messages", f"must be at most {bounds.limits.max_messages} messages, is {len(messages)}")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise invalid_argument(f"chat.messages[{index}].role", f"must be one of {', '.join(ROLES)}")
    _raise_if("chat.messages", _too_many_chars(sum(len(message.content) for message in messages), model))


def _too_many_chars(num_chars: int, model: ServedModel) -> str | None:
    limit = model.max_model_len * model.longest_token_chars
    return None if num_chars <= limit else f"is {num_chars} characters, which is above what {model.max_model_len} tokens can hold ({limit})"


def _too_many_tokens(num_tokens: int, model: ServedModel) -> str | None:
    """Looks at no token: a message can hold tens of millions, and a look at each would stall the event loop."""
    return None if num_tokens <= model.max_model_len else f"is {num_tokens} tokens, above the context of {model.max_model_len}"


def resolve(
    request: gateway_pb2.GenerateRequest,
    prompt_token_ids: Sequence[int],
    model: ServedModel,
    limits: RequestLimits,
    *,
    tenant: str,
    request_id: str,
    max_model_len: int,
) -> ResolvedRequest:
    """Puts defaults in and checks lengths; `max_model_len` is the pools' or the model's, whichever is shorter. Raises StatusError."""
    given, num_prompt, num_output = request.sampling_params, len(prompt_token_ids), len(request.output_token_ids)
    field = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}[request.WhichOneof("input") or "text"]
    left = max_model_len - num_prompt
    if num_prompt == 0:
        raise invalid_argument(field, "has no tokens")
    if left < 1:
        raise invalid_argument(field, f"is {num_prompt} tokens; with at least one token of output the context of {max_model_len} is too short")
    if given.HasField("max_tokens") and given.max_tokens > left:
        raise invalid_argument(
            "sampling_params.max_tokens", f"is {given.max_tokens}; with {num_prompt} prompt tokens the context of {max_model_len} leaves {left}"
        )
    max_tokens = given.max_tokens if given.HasField("max_tokens") else min(left, limits.max_new_tokens or left)
    if num_output > max_tokens:
        raise invalid_argument("output_token_ids", f"is {num_output} tokens, above max_tokens {max_tokens}")
    seed = given.seed if given.HasField("seed") else secrets.randbits(64)
    sent = SamplingParams()
    sent.CopyFrom(given)
    sent.ClearField("stop")
    sent.ClearField("include_stop_str_in_output")
    sent.ClearField("skip_special_tokens")
    sent.max_tokens, sent.seed = max_tokens, seed
    return ResolvedRequest(
        request_id=request_id,
        tenant=tenant,
        priority=request.priority,
        prompt_token_ids=prompt_token_ids,
        output_token_ids=request.output_token_ids,
        max_tokens=max_tokens,
        seed=seed,
        stop=tuple(given.stop),
        include_stop_str_in_output=given.include_stop_str_in_output,
        skip_special_tokens=given.skip_special_tokens if given.HasField("skip_special_tokens") else True,
        stop_token_ids=frozenset(given.stop_token_ids) | (frozenset() if given.ignore_eos else model.eos_token_ids),
        sampling_params=sent,
    )


def _raise_if(field: str, problem: str | None) -> None:
    if problem is not None:
        raise invalid_argument(field, problem)
