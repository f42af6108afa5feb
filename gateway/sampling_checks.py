"""Every check of a sampling parameter, in one closed table, and those of parameters against each other.

Each check looks at a length before it looks at what is in it: what it costs is bounded by the limits, not by the request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.limits import RequestLimits
from gateway.served_model import ServedModel
from rpc.errors import invalid_argument
from tandem.v1 import generation_pb2

SamplingParams = generation_pb2.SamplingParams
_MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What checks compare with."""

    vocab_size: int
    limits: RequestLimits


Check = Callable[..., str | None]
"""Sees a field that is set, and Bounds; returns what is wrong with it."""


def _number(low: float, high: float, *, open_low: bool = False) -> Check:
    """A finite number in [low, high], or (low, high]."""

    def check(value: float, _: Bounds) -> str | None:
        if not math.isfinite(value):
            return "must be a finite number"
        inside = low < value <= high if open_low else low <= value <= high
        upper = f" and at most {high:g}" if math.isfinite(high) else ""
        return None if inside else f"must be {'above' if open_low else 'at least'} {low:g}{upper}, is {value:g}"

    return check


def _anything(_: object, __: Bounds) -> str | None:
    return None


def _top_k(value: int, _: Bounds) -> str | None:
    return None if value >= -1 else f"must be -1 or 0 (off) or above, is {value}"


def _max_tokens(value: int, bounds: Bounds) -> str | None:
    limit = bounds.limits.max_new_tokens
    return None if limit is None or value <= limit else f"must be at most max_new_tokens {limit}, is {value}"


def _logprobs(value: int, bounds: Bounds) -> str | None:
    if value > bounds.limits.max_logprobs:
        return f"must be at most max_logprobs {bounds.limits.max_logprobs}, is {value}"
    return None if value <= bounds.vocab_size else f"must be at most the vocabulary's size {bounds.vocab_size}, is {value}"


def _n(value: int, bounds: Bounds) -> str | None:
    return None if 1 <= value <= bounds.limits.max_samples else f"must be at least 1 and at most max_samples {bounds.limits.max_samples}, is {value}"


def _stop(values: Sequence[str], bounds: Bounds) -> str | None:
    return _strings(values, bounds.limits.max_stop_strings, bounds.limits.max_stop_string_chars)


def _bad_words(values: Sequence[str], bounds: Bounds) -> str | None:
    return _strings(values, bounds.limits.max_bad_words, bounds.limits.max_bad_word_chars)


def _strings(values: Sequence[str], max_strings: int, max_chars: int) -> str | None:
    if len(values) > max_strings:
        return f"must be at most {max_strings} strings, is {len(values)}"
    lengths = [len(value) for value in values]
    if not all(lengths):
        return "must not hold an empty string"
    return None if max(lengths) <= max_chars else f"must hold strings of at most {max_chars} characters, one has {max(lengths)}"


def _stop_token_ids(values: Sequence[int], bounds: Bounds) -> str | None:
    return _too_many(len(values), bounds.limits.max_stop_token_ids, "token ids") or token_ids_problem(values, bounds.vocab_size)


def _allowed_token_ids(values: Sequence[int], bounds: Bounds) -> str | None:
    return _too_many(len(values), bounds.vocab_size, "token ids (the vocabulary's size)") or token_ids_problem(values, bounds.vocab_size)


def _logit_bias(values: Mapping[int, float], bounds: Bounds) -> str | None:
    problem = _too_many(len(values), bounds.limits.max_logit_biases, "entries") or token_ids_problem(values, bounds.vocab_size)
    if problem is not None:
        return problem
    beyond = [value for value in values.values() if not -_MAX_BIAS <= value <= _MAX_BIAS]  # what is no number is in no range either
    return f"must hold values of at least {-_MAX_BIAS:g} and at most {_MAX_BIAS:g}, one is {beyond[0]:g}" if beyond else None


def _bad_words_ids(values: Sequence[generation_pb2.TokenIds], bounds: Bounds) -> str | None:
    limits = bounds.limits
    problem = _too_many(len(values), limits.max_bad_words_ids, "runs")
    if problem is not None:
        return problem
    for run in values:
        if not run.ids:
            return "must not hold an empty run"
        if len(run.ids) > limits.max_bad_word_tokens:
            return f"must hold runs of at most {limits.max_bad_word_tokens} token ids, one has {len(run.ids)}"
        problem = token_ids_problem(run.ids, bounds.vocab_size)
        if problem is not None:
            return problem
    return None


def _too_many(number: int, limit: int, what: str) -> str | None:
    return None if number <= limit else f"must be at most {limit} {what}, is {number}"


def token_ids_problem(values: Iterable[int], vocab_size: int) -> str | None:
    """Looks at every id: bound their number first."""
    largest = max(values, default=0)
    return None if largest < vocab_size else f"must be below the vocabulary's size {vocab_size}, one is {largest}"


CHECKS: dict[str, Check] = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, open_low=True),
    "top_k": _top_k,
    "min_p": _number(0, 1),
    "max_tokens": _max_tokens,
    "min_tokens": _anything,  # against max_tokens, once that is known
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "include_stop_str_in_output": _anything,
    "ignore_eos": _anything,
    "skip_special_tokens": _anything,
    "n": _n,
    "seed": _anything,
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, math.inf, open_low=True),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "bad_words": _bad_words,
    "bad_words_ids": _bad_words_ids,
}
"""One check per field of SamplingParams."""


def check_sampling(params: SamplingParams, model: ServedModel, limits: RequestLimits) -> None:
    """Checks each field by itself, and those that forbid each other. Raises StatusError."""
    bounds = Bounds(model.vocab_size, limits)
    for field, value in params.ListFields():
        raise_if(f"sampling_params.{field.name}", CHECKS[field.name](value, bounds))
    if params.HasField("max_tokens"):
        raise_if("sampling_params.min_tokens", min_tokens_problem(params.min_tokens, params.max_tokens))
    if params.min_tokens and params.allowed_token_ids:
        nothing_left = end_token_ids(params, model).issuperset(params.allowed_token_ids)
        raise_if("sampling_params.allowed_token_ids", "must hold one that does not end the sequence, as min_tokens is above 0" if nothing_left else None)


def min_tokens_problem(min_tokens: int, max_tokens: int) -> str | None:
    """min_tokens against the max_tokens in force."""
    return None if min_tokens <= max_tokens else f"must be at most max_tokens {max_tokens}, is {min_tokens}"


def end_token_ids(params: SamplingParams, model: ServedModel) -> frozenset[int]:
    """All tokens that end a sequence: those of the request, and the model's own unless they are ignored."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else model.eos_token_ids)


def raise_if(field: str, problem: str | None) -> None:
    """Raises StatusError INVALID_ARGUMENT when there is a problem."""
    if problem is not None:
        raise invalid_argument(field, problem)
