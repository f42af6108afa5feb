"""The engine's words as messages of tandem.v1 and back. The only module of the engine that knows the contract.

What comes from outside is checked here once more, whoever checked it before: a value out of range is a FieldError that names its field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import EngineError
from engine.kv_cache import KvLayout
from engine.sampling_params import Finish, FinishReason, SampledToken, SamplingParams
from tandem.v1 import generation_pb2, kv_pb2, prefill_pb2

MAX_LOGPROBS = 20
MAX_SAMPLES = 16
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
_TINIEST, _LARGEST = 2.0**-149, (2.0 - 2.0**-23) * 2.0**127
"""The least and the greatest finite float32 above 0."""
_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
}
_FINISH_REASONS_BACK = {number: reason for reason, number in _FINISH_REASONS.items()}


class FieldError(EngineError):
    """A value that is out of its range; `field` names it as the contract does."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field} {description}")
        self.field = field
        self.description = description


def sampling_params_from_proto(
    message: generation_pb2.SamplingParams, *, vocab_size: int, field: str = "sampling_params", sample_index: int = 0
) -> SamplingParams:
    """Raises FieldError for a value out of range, for a missing seed or max_tokens, and for bad words that are still text.

    Stop strings and what concerns text belong to the gateway and are not looked at. Numbers are float32 here as in the message, so that every process
    computes with the same ones.
    """
    for name in ("max_tokens", "seed"):
        if not message.HasField(name):
            raise FieldError(f"{field}.{name}", "must be set")
    if message.bad_words:
        raise FieldError(f"{field}.bad_words", "must come as bad_words_ids: only a gateway can tokenize")
    most_logprobs = min(MAX_LOGPROBS, vocab_size)
    numbers = _Numbers(message, field)
    return SamplingParams(
        max_tokens=message.max_tokens,
        n=numbers.integer("n", 1, 1, MAX_SAMPLES),
        min_tokens=numbers.integer("min_tokens", 0, 0, message.max_tokens),
        temperature=numbers.real("temperature", 1.0, 0.0, 2.0),
        top_p=numbers.real("top_p", 1.0, _TINIEST, 1.0),
        top_k=max(numbers.integer("top_k", 0, -1, 2**31 - 1), 0),
        min_p=numbers.real("min_p", 0.0, 0.0, 1.0),
        seed=message.seed,
        sample_index=sample_index,
        stop_token_ids=frozenset(token_ids_from_proto(message.stop_token_ids, vocab_size=vocab_size, field=f"{field}.stop_token_ids")),
        ignore_eos=message.ignore_eos,
        logprobs=numbers.integer("logprobs", 0, 0, most_logprobs) if message.HasField("logprobs") else None,
        prompt_logprobs=numbers.integer("prompt_logprobs", 0, 0, most_logprobs) if message.HasField("prompt_logprobs") else None,
        presence_penalty=numbers.real("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=numbers.real("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=numbers.real("repetition_penalty", 1.0, _TINIEST, _LARGEST),
        logit_bias=_logit_bias(message, vocab_size, f"{field}.logit_bias"),
        allowed_token_ids=tuple(dict.fromkeys(token_ids_from_proto(message.allowed_token_ids, vocab_size=vocab_size, field=f"{field}.allowed_token_ids"))),
        bad_words_ids=_bad_words_ids(message, vocab_size, f"{field}.bad_words_ids"),
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Scalars of a message: the default where one is absent, a FieldError where one is out of its range or none at all."""

    message: generation_pb2.SamplingParams
    field: str

    def integer(self, name: str, default: int, lowest: int, highest: int) -> int:
        return int(self._checked(name, default, lowest, highest))

    def real(self, name: str, default: float, lowest: float, highest: float) -> float:
        return float(self._checked(name, default, lowest, highest))

    def _checked(self, name: str, default: float, lowest: float, highest: float) -> float:
        presence = self.message.DESCRIPTOR.fields_by_name[name].has_presence
        value: float = default if presence and not self.message.HasField(name) else getattr(self.message, name)
        if not lowest <= value <= highest:  # in words only then: each request has a dozen of these; NaN ends up here too
            raise FieldError(f"{self.field}.{name}", f"{_range_in_words(lowest, highest)}, got {value}")
        return value


def _range_in_words(lowest: float, highest: float) -> str:
    if highest >= 2**31 - 1:
        return "must be above 0 and finite" if lowest == _TINIEST else f"must be at least {lowest:g}"
    return f"must be above 0 and at most {highest:g}" if lowest == _TINIEST else f"must be from {lowest:g} to {highest:g}"


def _check(holds: bool, field: str, description: str, value: object) -> None:
    if not holds:  # NaN compares false everywhere and ends up here too
        raise FieldError(field, f"{description}, got {value}")


def _logit_bias(message: generation_pb2.SamplingParams, vocab_size: int, field: str) -> tuple[tuple[int, float], ...]:
    _check(len(message.logit_bias) <= MAX_LOGIT_BIASES, field, f"must have at most {MAX_LOGIT_BIASES} entries", len(message.logit_bias))
    token_ids_from_proto(message.logit_bias, vocab_size=vocab_size, field=field)
    for bias in message.logit_bias.values():
        _check(-100.0 <= bias <= 100.0, field, "must be from -100 to 100", bias)
    return tuple(sorted(message.logit_bias.items()))


def _bad_words_ids(message: generation_pb2.SamplingParams, vocab_size: int, field: str) -> tuple[tuple[int, ...], ...]:
    _check(len(message.bad_words_ids) <= MAX_BAD_WORDS, field, f"must be at most {MAX_BAD_WORDS} runs", len(message.bad_words_ids))
    for run in message.bad_words_ids:
        _check(1 <= len(run.ids) <= MAX_BAD_WORD_TOKENS, field, f"must be runs of 1 to {MAX_BAD_WORD_TOKENS} token ids", len(run.ids))
    return tuple(token_ids_from_proto(run.ids, vocab_size=vocab_size, field=field) for run in message.bad_words_ids)


def sampling_params_to_proto(params: SamplingParams) -> generation_pb2.SamplingParams:
    """Floats travel as float32; the sample index travels beside the message."""
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "n", "seed", "ignore_eos", "logprobs", "prompt_logprobs")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    return generation_pb2.SamplingParams(
        **{name: getattr(params, name) for name in names + penalties},
        stop_token_ids=sorted(params.stop_token_ids),
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        bad_words_ids=[generation_pb2.TokenIds(ids=run) for run in params.bad_words_ids],
    )


def token_ids_from_proto(ids: Iterable[int], *, vocab_size: int, field: str) -> tuple[int, ...]:
    """A repeated uint32 as a tuple; raises FieldError for an id that the model does not have."""
    token_ids = tuple(ids)
    if token_ids and max(token_ids) >= vocab_size:
        raise FieldError(field, f"must be below the vocabulary size {vocab_size}, got {max(token_ids)}")
    return token_ids


def kv_layout_to_proto(layout: KvLayout) -> kv_pb2.KvLayout:
    """Field by field; the names are the same."""
    return kv_pb2.KvLayout(**{name: getattr(layout, name) for name in KvLayout.__slots__})


def kv_layout_from_proto(message: kv_pb2.KvLayout) -> KvLayout:
    """Takes any values: what does not pair is found by comparing layouts, not here.

    A field that was not set is 0, which no pool's layout has: an unset num_head_shards differs from 1 and is refused as such.
    """
    return KvLayout(**{name: getattr(message, name) for name in KvLayout.__slots__})


def token_to_proto(token: SampledToken) -> generation_pb2.TokenLogprob:
    """Log probability and alternatives of a token that has them; raises ValueError for one that has none."""
    if token.logprob is None:
        raise ValueError(f"token {token.token_id} has no log probability")
    top = [generation_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top_logprobs]
    return generation_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob, top_logprobs=top)


def first_token_to_proto(token: SampledToken) -> prefill_pb2.FirstToken:
    """A token, and its log probability if it has one."""
    return prefill_pb2.FirstToken(token_id=token.token_id, logprob=None if token.logprob is None else token_to_proto(token))


def first_token_from_proto(message: prefill_pb2.FirstToken, *, vocab_size: int) -> SampledToken:
    """Raises FieldError when an id is unknown, the token's and its log probability's differ, or a number is no log probability."""
    if not message.HasField("logprob"):
        token_ids_from_proto([message.token_id], vocab_size=vocab_size, field="first_tokens.token_id")
        return SampledToken(message.token_id)
    if message.logprob.token_id != message.token_id:
        raise FieldError("first_tokens.logprob", f"is of token {message.logprob.token_id}, but the token is {message.token_id}")
    return _token_from_proto(message.logprob, vocab_size, "first_tokens.logprob")


def prompt_logprobs_from_proto(messages: Iterable[generation_pb2.TokenLogprob], *, vocab_size: int) -> tuple[SampledToken, ...]:
    """Entries in their order. Raises FieldError when an id is unknown or a number is no log probability."""
    return tuple(_token_from_proto(message, vocab_size, "prompt_logprobs") for message in messages)


def _token_from_proto(message: generation_pb2.TokenLogprob, vocab_size: int, field: str) -> SampledToken:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top_logprobs)
    token_ids_from_proto((message.token_id, *(token_id for token_id, _ in top)), vocab_size=vocab_size, field=field)
    for logprob in (message.logprob, *(logprob for _, logprob in top)):
        _check(logprob < math.inf, field, "must be a log probability", logprob)
    return SampledToken(message.token_id, message.logprob, top)


def finish_to_proto(finish: Finish) -> generation_pb2.Finish:
    """The matched token id is set only when a token ended the sequence."""
    message = generation_pb2.Finish(finish_reason=_FINISH_REASONS[finish.reason])
    if finish.matched_token_id is not None:
        message.matched_token_id = finish.matched_token_id
    return message


def finish_from_proto(message: generation_pb2.Finish) -> Finish:
    """Raises FieldError for a reason that an engine does not give."""
    reason = _FINISH_REASONS_BACK.get(message.finish_reason)
    if reason is None:
        raise FieldError("finish_reason", f"is {message.finish_reason}, which no engine gives")
    return Finish(reason, message.matched_token_id if message.WhichOneof("matched_stop") == "matched_token_id" else None)
