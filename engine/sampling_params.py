"""How one sequence's tokens are chosen and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Self


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended; `matched_token_id` is set when a token ended it."""

    reason: FinishReason
    matched_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of a pure function of (logits, these, tokens so far, position); see design rule 3.

    The engine trusts its caller for ranges: the gateway refuses bad values by field name, `engine.proto` checks them again.
    """

    max_tokens: int
    """Most tokens to generate, counted from the end of the prompt (tokens of a resume included)."""
    n: int = 1
    """Samples of the one prompt; sample i draws its noise with sample index `sample_index` + i."""
    min_tokens: int = 0
    """The first min_tokens output tokens are none that would end the sequence."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int = 0
    """Key of the sampling noise, unsigned 64 bit."""
    sample_index: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """End the sequence; the matched token stays in the output."""
    ignore_eos: bool = False
    """Do not end at the model's own end-of-sequence tokens."""
    logprobs: int | None = None
    """Report each token's log probability and this many alternatives."""
    prompt_logprobs: int | None = None
    """Report the same for each prompt token but the first; the whole prompt is computed for it, whatever is cached."""
    presence_penalty: float = 0.0
    """Taken from the logits of all tokens in the output."""
    frequency_penalty: float = 0.0
    """Taken from them once for each occurrence in the output."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the others, of all tokens in prompt and output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit), each token once."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be sampled; empty: all."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Runs of token ids of which the last is not sampled behind the others. None is empty."""

    @property
    def greedy(self) -> bool:
        """No noise is drawn."""
        return self.temperature == 0.0

    def of_sample(self, index: int) -> Self:
        """Those of the one sample `index`, from 0, of `n`."""
        return replace(self, n=1, sample_index=self.sample_index + index)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token; log probabilities are natural logs before temperature, most likely alternative first."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def finish_of(
    params: SamplingParams, eos_token_ids: frozenset[int], token_id: int, num_output_tokens: int, num_tokens: int, max_model_len: int
) -> Finish | None:
    """Says whether a sequence ends with `token_id`, its `num_output_tokens`-th output token and `num_tokens`-th token in all.

    Both pools decide with this one function, so that neither needs the other's word for it.
    """
    may_stop = num_output_tokens > params.min_tokens
    if may_stop and (token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids)):
        return Finish(FinishReason.STOP, token_id)
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return Finish(FinishReason.LENGTH)
    return None
