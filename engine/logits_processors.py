"""What parameters do to a row of logits before temperature and filters: a pure function of the row, its parameters and its tokens so far.

The order is vLLM's: allowed tokens, bad words, min_tokens, logit bias, then penalties (repetition first). A token that may not be sampled has -inf and keeps
it, whatever comes behind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from engine.sampling_params import SamplingParams
from engine.step import SampleRow

_LARGEST = torch.finfo(torch.float32).max


def changes_logits(row: SampleRow) -> bool:
    """Whether `processed` would do anything; most rows ask for nothing of it, and cost nothing."""
    params = row.params
    # min_tokens forbids ends; a row that ignores the model's own and has no others pays nothing for it.
    forbids_ends = _too_short(row) and bool(params.stop_token_ids or not params.ignore_eos)
    return _penalized(params) or forbids_ends or bool(params.logit_bias or params.allowed_token_ids or params.bad_words_ids)


def processed(logits: torch.Tensor, row: SampleRow, eos_token_ids: frozenset[int]) -> torch.Tensor:
    """A copy of one row of logits, float32 [vocabulary], each finite or -inf, as `row` wants them.

    No value of it is +inf or NaN; all are -inf where no token is left.
    """
    params = row.params
    values = _only(logits, params.allowed_token_ids) if params.allowed_token_ids else logits.clone()
    forbidden = set(_ends_of_bad_words(params.bad_words_ids, row.token_ids))
    if _too_short(row):
        forbidden |= params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids
    if forbidden:
        values[_indices(forbidden, values)] = -math.inf
    if params.logit_bias:
        values[_indices((token_id for token_id, _ in params.logit_bias), values)] += values.new_tensor([bias for _, bias in params.logit_bias])
    if _penalized(params):
        _penalize(values, row)
    return values.clamp_(max=_LARGEST)  # a tiny repetition penalty can take a logit beyond float32


def _penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _too_short(row: SampleRow) -> bool:
    return len(row.token_ids) - row.num_prompt_tokens < row.params.min_tokens


def _only(logits: torch.Tensor, token_ids: Iterable[int]) -> torch.Tensor:
    indices = _indices(token_ids, logits)
    return torch.full_like(logits, -math.inf).index_copy_(0, indices, logits[indices])


def _ends_of_bad_words(runs: Iterable[Sequence[int]], token_ids: Sequence[int]) -> Iterator[int]:
    """Last tokens of those runs that all tokens so far, prompt and output, end in but for the last."""
    for *start, last in runs:
        if not start or list(token_ids[-len(start) :]) == start:
            yield last


def _penalize(values: torch.Tensor, row: SampleRow) -> None:
    """In place. One operation at a time: a fused one would round by where in the tensor a token lies."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = _indices(set(row.token_ids), values)
        before = values[seen]
        values[seen] = torch.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        counts = Counter(row.token_ids[row.num_prompt_tokens :])
        generated = _indices(counts, values)
        values[generated] -= values.new_tensor(list(counts.values())) * params.frequency_penalty
        values[generated] -= params.presence_penalty


def _indices(token_ids: Iterable[int], values: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=values.device)
