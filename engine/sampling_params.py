"""How one sequence's tokens are chosen and when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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

    @property
    def greedy(self) -> bool:
        """No noise is drawn."""
        return self.temperature == 0.0


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
    if token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids):
        return Finish(FinishReason.STOP, token_id)
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return Finish(FinishReason.LENGTH)
    return None
