"""How tokens are chosen and when to stop, as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tandem.v1 import generation_pb2


class Sampling(TypedDict, total=False):
    """What may be given by name to `generate`, `chat` and the streams; names and ranges are those of SamplingParams. None is the same as not given."""

    temperature: float | None
    """Softmax temperature, 0 to 2; 0 is greedy. Default 1."""
    top_p: float | None
    """Nucleus mass, above 0 to 1. Default 1 (off)."""
    top_k: int | None
    """Keep the k most likely tokens; 0 or -1 is off. Default 0."""
    min_p: float | None
    """Keep tokens at least min_p times as likely as the most likely one, 0 to 1. Default 0 (off)."""
    max_tokens: int | None
    """Most tokens of the completion; 0: the prompt is computed, and no token. Default: what is left of the context."""
    min_tokens: int | None
    """Neither a stop string nor a token ends the completion within so many tokens. Default 0."""
    stop: str | Sequence[str] | None
    """Text that ends the completion, or several; the text is cut in front of the match."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the completion."""
    include_stop_str_in_output: bool | None
    """Keep the matched stop string in the text. Default false."""
    ignore_eos: bool | None
    """Do not end at the model's end-of-sequence tokens. Default false."""
    skip_special_tokens: bool | None
    """Leave special tokens out of the text. Default true."""
    n: int | None
    """Samples of the prompt, each with noise of its own from the one seed. Default 1. More than one cannot be resumed after a cut."""
    seed: int | None
    """Seed of the sampling noise, 0 to 2**64 - 1. When not given the gateway draws one and tells it."""
    logprobs: int | None
    """Log probability of each token, and of this many most likely ones. Default: none."""
    prompt_logprobs: int | None
    """The same of each prompt token but the first; no prefix cache is read then. Default: none."""
    presence_penalty: float | None
    """On tokens already present in the output, -2 to 2. Default 0."""
    frequency_penalty: float | None
    """Per occurrence in the output, -2 to 2. Default 0."""
    repetition_penalty: float | None
    """Multiplicative, on tokens of prompt and output, above 0. Default 1."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these token ids, -100 to 100 each."""
    allowed_token_ids: Sequence[int] | None
    """Only these may be generated. Default: all."""
    bad_words: Sequence[str] | None
    """Texts that may not be generated, at the start of a word and within one."""
    bad_words_ids: Sequence[Sequence[int]] | None
    """Runs of token ids that may not be generated."""


def sampling_params(given: Mapping[str, Any]) -> generation_pb2.SamplingParams:
    """The request's parameters. Raises TypeError and ValueError that name the parameter: one that is unknown, of a wrong type, or too large for its field.

    Whether a value makes sense is the gateway's to say (InvalidRequest).
    """
    params = generation_pb2.SamplingParams()
    for name, value in given.items():
        if name not in Sampling.__annotations__:
            raise TypeError(f"unexpected parameter {name!r}; those of Sampling are {', '.join(sorted(Sampling.__annotations__))}")
        if value is None:
            continue
        try:
            params.MergeFrom(generation_pb2.SamplingParams(**{name: _as_field(name, value)}))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
    return params


def _as_field(name: str, value: Any) -> Any:
    if name == "stop":
        return [value] if isinstance(value, str) else list(value)
    if name == "bad_words" and isinstance(value, str):
        raise TypeError("a list of texts is needed, not one text")  # a str is a sequence of its characters
    if name == "bad_words_ids":
        return [generation_pb2.TokenIds(ids=run) for run in value]
    return value
