"""The engine's words as messages of tandem.v1 and back. The only module of the engine that knows the contract.

What comes from outside is checked here once more, whoever checked it before: a value out of range is a FieldError that names its field.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine.errors import EngineError
from engine.kv_cache import KvLayout
from engine.sampling_params import Finish, FinishReason, SampledToken, SamplingParams
from tandem.v1 import generation_pb2, kv_pb2

MAX_LOGPROBS = 20
_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
}
_FINISH_REASONS_BACK = {number: reason for reason, number in _FINISH_REASONS.items()}
# What this engine cannot do yet, as (field, value that changes nothing): asked for, it is refused and never dropped in silence.
_NEUTRAL: tuple[tuple[str, float], ...] = (
    ("n", 1),
    ("min_tokens", 0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
)
_UNSUPPORTED_COLLECTIONS = ("logit_bias", "allowed_token_ids", "bad_words")


class FieldError(EngineError):
    """A value that is out of its range; `field` names it as the contract does."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field} {description}")
        self.field = field
        self.description = description


def sampling_params_from_proto(message: generation_pb2.SamplingParams, *, vocab_size: int, field: str = "sampling_params") -> SamplingParams:
    """Raises FieldError for a value out of range, for a missing seed or max_tokens, and for what the engine cannot do.

    Stop strings and what concerns text belong to the gateway and are not looked at.
    """
    _refuse_unsupported(message, field)
    for name in ("max_tokens", "seed"):
        if not message.HasField(name):
            raise FieldError(f"{field}.{name}", "must be set")
    temperature = message.temperature if message.HasField("temperature") else 1.0
    top_p = message.top_p if message.HasField("top_p") else 1.0
    _check(0.0 <= temperature <= 2.0, f"{field}.temperature", "must be from 0 to 2", temperature)
    _check(0.0 < top_p <= 1.0, f"{field}.top_p", "must be above 0 and at most 1", top_p)
    _check(message.top_k >= -1, f"{field}.top_k", "must be at least -1", message.top_k)
    _check(0.0 <= message.min_p <= 1.0, f"{field}.min_p", "must be from 0 to 1", message.min_p)
    _check(message.logprobs <= min(MAX_LOGPROBS, vocab_size), f"{field}.logprobs", f"must be at most {min(MAX_LOGPROBS, vocab_size)}", message.logprobs)
    token_ids_from_proto(message.stop_token_ids, vocab_size=vocab_size, field=f"{field}.stop_token_ids")
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=max(message.top_k, 0),
        min_p=message.min_p,
        seed=message.seed,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def _check(holds: bool, field: str, description: str, value: object) -> None:
    if not holds:  # NaN compares false everywhere and ends up here too
        raise FieldError(field, f"{description}, got {value}")


def _refuse_unsupported(message: generation_pb2.SamplingParams, field: str) -> None:
    for name, neutral in _NEUTRAL:
        if message.HasField(name) and getattr(message, name) != neutral:
            raise FieldError(f"{field}.{name}", f"is not supported by this engine other than {neutral}")
    for name in _UNSUPPORTED_COLLECTIONS:
        if getattr(message, name):
            raise FieldError(f"{field}.{name}", "is not supported by this engine")
    if message.HasField("prompt_logprobs"):
        raise FieldError(f"{field}.prompt_logprobs", "is not supported by this engine")


def sampling_params_to_proto(params: SamplingParams) -> generation_pb2.SamplingParams:
    """Floats travel as float32."""
    message = generation_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        max_tokens=params.max_tokens,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        seed=params.seed,
    )
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    return message


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
    """Takes any values: what does not pair is found by comparing layouts, not here."""
    return KvLayout(**{name: getattr(message, name) for name in KvLayout.__slots__})


def token_to_proto(token: SampledToken) -> generation_pb2.TokenLogprob:
    """Log probability and alternatives of a token that has them; raises ValueError for one that has none."""
    if token.logprob is None:
        raise ValueError(f"token {token.token_id} has no log probability")
    top = [generation_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top_logprobs]
    return generation_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob, top_logprobs=top)


def token_from_proto(token_id: int, message: generation_pb2.TokenLogprob | None, *, vocab_size: int) -> SampledToken:
    """A token and, if given, its log probability. Raises FieldError when the id is unknown, the two differ, or a number is none."""
    if token_id >= vocab_size:
        raise FieldError("token_id", f"must be below the vocabulary size {vocab_size}, got {token_id}")
    if message is None:
        return SampledToken(token_id)
    if message.token_id != token_id:
        raise FieldError("logprob.token_id", f"is {message.token_id}, but the token is {token_id}")
    top = tuple((entry.token_id, entry.logprob) for entry in message.top_logprobs)
    if any(math.isnan(value) or value == math.inf for value in (message.logprob, *(value for _, value in top))):
        raise FieldError("logprob", "is not a log probability")
    return SampledToken(token_id, message.logprob, top)


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
