"""Sampling parameters by OpenAI's and vLLM's names, the same in completions and chat."""

from __future__ import annotations

from gateway.http.json_body import UINT64, Body, real, shown_name, token_ids, whole
from rpc.errors import invalid_argument
from tandem.v1 import generation_pb2

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_WHOLES = ("n", "min_tokens", "prompt_logprobs")
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
_INT64_LOWEST = -(1 << 63)
_INT32 = (1 << 31) - 1


def read_sampling(body: Body) -> generation_pb2.SamplingParams:
    """Takes all but max_tokens and logprobs, which the two endpoints name differently. Ranges are the core's to check. Raises StatusError."""
    params = generation_pb2.SamplingParams()
    for name in _NUMBERS:
        if (number := body.number(name)) is not None:
            setattr(params, name, number)
    for name in _WHOLES:
        if (integer := body.integer(name)) is not None:
            setattr(params, name, integer)
    for name in _FLAGS:
        if (flag := body.flag(name)) is not None:
            setattr(params, name, flag)
    if (top_k := body.integer("top_k", -_INT32, _INT32)) is not None:
        params.top_k = top_k
    # OpenAI's seeds have a sign: a negative one is the number with the same 64 bits.
    if (seed := body.integer("seed", _INT64_LOWEST, UINT64)) is not None:
        params.seed = seed & UINT64
    params.stop.extend(body.texts("stop"))
    params.bad_words.extend(body.texts("bad_words"))
    params.stop_token_ids.extend(body.ids("stop_token_ids"))
    params.allowed_token_ids.extend(body.ids("allowed_token_ids"))
    _read_logit_bias(body, params)
    _read_bad_words_ids(body, params)
    body.only("use_beam_search", False)
    body.only("length_penalty", 1, 1.0)
    body.only("spaces_between_special_tokens", True)
    body.only("truncate_prompt_tokens")
    return params


def _read_logit_bias(body: Body, params: generation_pb2.SamplingParams) -> None:
    biases = body.child("logit_bias")
    if biases is None:
        return
    for key, value in biases.items():
        field = f"logit_bias.{shown_name(key)}"
        # 07 and 7 would be one token with two biases.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and key == str(int(key))):
            raise invalid_argument(field, "must be named by a token id")
        params.logit_bias[whole(int(key), field)] = real(value, field)


def _read_bad_words_ids(body: Body, params: generation_pb2.SamplingParams) -> None:
    runs = body.take("bad_words_ids")
    if runs is None:
        return
    if not isinstance(runs, list) or not all(isinstance(run, list) for run in runs):
        raise body.wrong("bad_words_ids", "must be a list of lists of token ids")
    for index, run in enumerate(runs):
        params.bad_words_ids.add(ids=token_ids(run, f"bad_words_ids[{index}]"))
