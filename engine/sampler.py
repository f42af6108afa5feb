"""Choosing tokens: a pure function of a row's logits, parameters, seed, sample index and position (design rule 3).

A row's result depends on no other row. Order: `engine.logits_processors`, temperature, then top_k, top_p and min_p; each filter sees only what the one
before it kept. Log probabilities are those of the logits before all of this.
Tokens are ordered by (logit, descending; token id, ascending), so that top_k keeps exactly k tokens and ties go to the lower id everywhere.

Noise is Gumbel-max: the token with the greatest logit / temperature - log(-log(1 - u)) wins, where u comes from a hash of (seed, sample index, position,
token id), see `engine.noise`. A first pass in float32 finds the few that may win, a second one in exact integers and float64 decides among them, so that
the winner does not hang on a device's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.errors import NoTokenLeftError, SequenceError
from engine.kernels.native_sampling import NativeSampling
from engine.logits_processors import changes_logits, processed
from engine.noise import RowKey, gumbel, gumbel_approximately, row_key
from engine.sampling_params import SampledToken, SamplingParams
from engine.step import SampleRow

_NUM_FINALISTS = 4
"""The first pass errs by some 1e-5: more tokens than this within that of the winner do not happen."""

_LOWEST = torch.finfo(torch.float32).min

_TOP_P_CANDIDATES = (256, 4096)
"""Tokens looked at first, and next; only when they hold too little of the mass is the whole vocabulary sorted."""


def sample(
    logits: torch.Tensor, samples: Sequence[Sequence[SampleRow]], eos_token_ids: frozenset[int], native: NativeSampling | None = None
) -> list[tuple[SampledToken, ...] | SequenceError]:
    """Samples one token for each of `samples[i]` from row i of `logits`, float32 [rows, vocabulary].

    A row with NaN, with +inf or without any finite logit gives a SequenceError in its place, one of whose tokens a sample's parameters leave none a
    NoTokenLeftError. With `native`, for logits on CPU, the same tokens come sooner.
    """
    best, highest = _greatest(logits)
    outcomes: list[tuple[SampledToken, ...] | SequenceError] = []
    for index, rows in enumerate(samples):
        try:
            if not math.isfinite(highest[index]):
                raise SequenceError(f"logits are not finite at position {rows[0].position}")
            outcomes.append(tuple(_sample_one(logits, highest[index], best[index], index, row, eos_token_ids, native) for row in rows))
        except SequenceError as error:
            outcomes.append(error)
    return outcomes


def _greatest(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Index of each row's greatest value, the first one of equals, or of a NaN; and that value. On CPU by numpy: torch's operations cost 0.1 ms each there,
    behind a step that has put everything else into the caches.
    """
    if logits.device.type != "cpu":
        indices = logits.argmax(dim=-1)
        return indices.tolist(), logits.gather(1, indices[:, None])[:, 0].tolist()
    values = logits.numpy()
    best = values.argmax(axis=-1)
    return best.tolist(), values[np.arange(len(best)), best].tolist()


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_alternatives: int) -> list[SampledToken]:
    """Log probabilities of `token_ids[i]` in row i of `logits`, float32 [rows, vocabulary]. Raises SequenceError for a row without usable logits."""
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise SequenceError("logits of the prompt are not finite")
    return [_with_logprobs(row, token_id, num_alternatives) for row, token_id in zip(logits, token_ids, strict=True)]


def _sample_one(
    logits: torch.Tensor, highest: float, best: int, index: int, row: SampleRow, eos_token_ids: frozenset[int], native: NativeSampling | None
) -> SampledToken:
    """From row `index` of `logits`, whose greatest value is `highest` and belongs to the token `best`."""
    params = row.params
    if changes_logits(row):
        values = processed(logits[index], row, eos_token_ids)
        [best], [greatest] = _greatest(values[None])
        if greatest == -math.inf:
            raise NoTokenLeftError(f"the sampling parameters leave no token at position {row.position}")
        token_id = best if params.greedy else _draw(values, greatest, row, native)
    else:
        token_id = best if params.greedy else _draw(logits[index], highest, row, native)
    return SampledToken(token_id) if params.logprobs is None else _with_logprobs(logits[index], token_id, params.logprobs)


def _draw(logits: torch.Tensor, highest: float, row: SampleRow, native: NativeSampling | None) -> int:
    """Draws from one row, [vocabulary]. Logits are taken relative to the highest, so that a small temperature costs no precision near it."""
    params = row.params
    key = row_key(params.seed, params.sample_index, row.position)
    if native is not None and not _filters(params, len(logits)):
        candidates = native.candidates(logits.numpy(), highest, params.temperature, key)
        if candidates is not None:
            values = (logits.numpy()[candidates] - np.float32(highest)).tolist()
            return _winner(values, candidates, params.temperature, key)
    relative = logits - highest
    token_ids = _kept(relative, params)
    if token_ids is not None:
        relative = relative[token_ids]
    scores = gumbel_approximately(key, token_ids, logits.shape[0], logits.device).add_(relative / params.temperature)
    finalists = torch.topk(scores, min(_NUM_FINALISTS, scores.shape[0])).indices
    values = relative[finalists].tolist()
    ids = (finalists if token_ids is None else token_ids[finalists]).tolist()
    return _winner(values, ids, params.temperature, key)


def _winner(values: Sequence[float], token_ids: Sequence[int], temperature: float, key: RowKey) -> int:
    """Of tokens and their logits relative to the highest."""
    scored = [(-(value / temperature + gumbel(key, token_id)), int(token_id)) for value, token_id in zip(values, token_ids, strict=True)]
    return min(scored)[1]


def _filters(params: SamplingParams, vocab_size: int) -> bool:
    """Whether any leaves tokens out."""
    return 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0


def _kept(relative: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """Token ids that the filters leave, most likely first; None if none is on."""
    vocab_size = relative.shape[0]
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    if not top_k and params.top_p >= 1.0:
        return _likely_enough(relative, params) if params.min_p > 0.0 else None
    if top_k:
        token_ids = most_likely(relative, top_k)
        weights = _weights(relative[token_ids], params)
        mass = params.top_p * float(weights.sum())
    else:
        mass = params.top_p * float(torch.exp(relative / params.temperature).sum(dtype=torch.float64))
        for num_candidates in (*_TOP_P_CANDIDATES, vocab_size):
            token_ids = most_likely(relative, num_candidates)
            weights = _weights(relative[token_ids], params)
            if float(weights.sum()) >= mass:
                break
    if params.top_p < 1.0:
        num_kept = int((weights.cumsum(0) < mass).sum()) + 1
        token_ids, weights = token_ids[:num_kept], weights[:num_kept]
    return token_ids[weights >= params.min_p] if params.min_p > 0.0 else token_ids


def _likely_enough(relative: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """min_p alone needs no order: the most likely token's weight is 1. A coarse bound first, then the exact one on the few that pass it."""
    token_ids = _indices(relative >= (math.log(params.min_p) - 0.01) * params.temperature)
    return token_ids[_weights(relative[token_ids], params) >= params.min_p]


def _weights(relative: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities relative to the most likely token's, float64."""
    return torch.exp(relative.double() / params.temperature)


def most_likely(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` greatest of [n] values, greatest first, ties to the lower index; fewer where fewer are above -inf."""
    lowest = torch.topk(values, count, sorted=False).values.amin().clamp(min=_LOWEST) if count < values.shape[0] else _LOWEST
    indices = _indices(values >= lowest)
    return indices[torch.sort(values[indices], descending=True, stable=True).indices[:count]]


def _indices(mask: torch.Tensor) -> torch.Tensor:
    """Where a row is true. On CPU by numpy: torch's own shares this little among threads, and took 9 ms when others had the cores."""
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if mask.device.type == "cpu" else torch.nonzero(mask).flatten()


def _with_logprobs(logits: torch.Tensor, token_id: int, num_alternatives: int) -> SampledToken:
    """Natural logs of the softmax before temperature and filters."""
    logprobs = torch.log_softmax(logits, dim=-1)
    alternatives: tuple[tuple[int, float], ...] = ()
    if num_alternatives > 0:
        token_ids = most_likely(logits, num_alternatives)
        alternatives = tuple(zip(token_ids.tolist(), logprobs[token_ids].tolist(), strict=True))
    return SampledToken(token_id, float(logprobs[token_id]), alternatives)
