"""Random requests for the differential fuzz, as hypothesis strategies.

What ends, forbids or favours tokens is drawn as places in the completion that comes without it, and resolved from that completion: so it matters.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tandem.v1 import gateway_pb2, generation_pb2

NUM_STREAMS, LONGEST_PROMPT, LONGEST_OUTPUT, MAX_N = 3, 90, 40, 4
_FIRST_ORDINARY_TOKEN = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One request before it is resolved; a place is an index into the plain completion, taken modulo its length."""

    stream: int
    """Prompts are prefixes of a few streams of tokens, so that they share blocks."""
    num_prompt_tokens: int
    params: dict[str, Any]
    """Fields of SamplingParams that stand for themselves."""
    stop_places: tuple[tuple[int, int], ...] = ()
    """(place, characters) of stop strings in the plain text."""
    stop_token_place: int | None = None
    bad_runs: tuple[tuple[int, int], ...] = ()
    """(place, tokens)."""
    biases: tuple[tuple[int, float], ...] = ()
    allowed_places: tuple[int, ...] = ()
    echo: bool = False
    resume_at: int | None = None

    def prompt(self, vocab_size: int) -> list[int]:
        """Token ids; the same stream gives the same beginning."""
        return random.Random(self.stream).choices(range(_FIRST_ORDINARY_TOKEN, vocab_size), k=LONGEST_PROMPT)[: self.num_prompt_tokens]


@dataclass(frozen=True, slots=True)
class Plain:
    """A case's completion without what is resolved from it: tokens and text of its first sample."""

    token_ids: list[int]
    text: str
    vocab_size: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)


def plain_params(case: Case) -> generation_pb2.SamplingParams:
    """The parameters of the plain completion."""
    params = {name: value for name, value in case.params.items() if name in ("temperature", "top_p", "top_k", "min_p", "seed")}
    return generation_pb2.SamplingParams(max_tokens=LONGEST_OUTPUT, ignore_eos=True, **params)


def request_of(case: Case, plain: Plain) -> gateway_pb2.GenerateRequest:
    """The whole request, but for the tokens of a resume."""
    sampling = generation_pb2.SamplingParams(**case.params)
    tokens, text = plain.token_ids, plain.text
    stops = (text[place % len(text) :][:length] for place, length in case.stop_places if text)
    # U+FFFD stands for bytes that are no character: when it is certain is the detokenizer's own affair.
    sampling.stop.extend(dict.fromkeys(stop for stop in stops if "\ufffd" not in stop))
    if case.stop_token_place is not None:
        sampling.stop_token_ids.append(tokens[case.stop_token_place % len(tokens)])
    for place, length in case.bad_runs:
        sampling.bad_words_ids.add(ids=tokens[place % len(tokens) :][:length])
    for place, value in case.biases:
        sampling.logit_bias[tokens[place % len(tokens)]] = value
    if case.allowed_places:
        ends = plain.eos_token_ids | frozenset(sampling.stop_token_ids)
        chosen = [tokens[place % len(tokens)] for place in case.allowed_places]
        # Never the end tokens alone: with min_tokens that is a request which the gateway refuses.
        ordinary = [token for token in range(_FIRST_ORDINARY_TOKEN, plain.vocab_size) if token not in ends and token not in chosen]
        sampling.allowed_token_ids.extend(sorted({*chosen, *ordinary[:: len(ordinary) // 8]}))
    ids = generation_pb2.TokenIds(ids=case.prompt(plain.vocab_size))
    return gateway_pb2.GenerateRequest(token_ids=ids, sampling_params=sampling, echo=case.echo)


def _maybe(strategy: st.SearchStrategy[Any], neutral: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(neutral), st.just(neutral), strategy)


def _float32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, allow_nan=False)


_PLACES = st.integers(0, LONGEST_OUTPUT)


@st.composite
def _params(draw: st.DrawFn) -> dict[str, Any]:
    max_tokens = draw(st.one_of(st.integers(0, 3), st.integers(4, LONGEST_OUTPUT)))
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "seed": draw(st.integers(0, 2**64 - 1)),
        "n": draw(_maybe(st.integers(2, MAX_N), 1)),
        "temperature": draw(st.one_of(st.just(0.0), _float32(0.5, 2.0))),
        "top_p": draw(_maybe(_float32(0.125, 1.0), 1.0)),
        "top_k": draw(_maybe(st.integers(1, 40), 0)),
        "min_p": draw(_maybe(_float32(0.0, 0.5), 0.0)),
        "min_tokens": min(max_tokens, draw(_maybe(st.integers(1, LONGEST_OUTPUT), 0))),
        "ignore_eos": draw(st.booleans()),
        "presence_penalty": draw(_maybe(_float32(-2.0, 2.0), 0.0)),
        "frequency_penalty": draw(_maybe(_float32(-2.0, 2.0), 0.0)),
        "repetition_penalty": draw(_maybe(_float32(0.5, 2.0), 1.0)),
        "include_stop_str_in_output": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
    }
    for name in ("logprobs", "prompt_logprobs"):
        number = draw(_maybe(st.integers(0, 5), None))
        if number is not None:
            params[name] = number
    return params


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One request."""
    params = draw(_params())
    return Case(
        stream=draw(st.integers(0, NUM_STREAMS - 1)),
        num_prompt_tokens=draw(st.one_of(st.integers(1, LONGEST_PROMPT), st.sampled_from((1, 7, 8, 9, 16, 64)))),
        params=params,
        stop_places=draw(_maybe(st.lists(st.tuples(st.integers(0, 80), st.integers(1, 6)), min_size=1, max_size=3).map(tuple), ())),
        stop_token_place=draw(_maybe(_PLACES, None)),
        bad_runs=draw(_maybe(st.lists(st.tuples(_PLACES, st.integers(1, 3)), min_size=1, max_size=3).map(tuple), ())),
        biases=draw(_maybe(st.lists(st.tuples(_PLACES, _float32(-100.0, 100.0)), min_size=1, max_size=3).map(tuple), ())),
        allowed_places=draw(_maybe(st.lists(_PLACES, min_size=1, max_size=5).map(tuple), ())),
        echo=draw(st.booleans()),
        resume_at=draw(_maybe(_PLACES, None)) if params["n"] == 1 else None,
    )


def batches() -> st.SearchStrategy[list[Case]]:
    """Requests that run at the same time."""
    return st.lists(cases(), min_size=6, max_size=14)
