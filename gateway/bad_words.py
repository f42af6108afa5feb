"""Texts that may not be generated, as the runs of token ids that would write them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from gateway.limits import RequestLimits
from rpc.errors import invalid_argument

_FIELD = "sampling_params.bad_words"


def bad_words_runs(words: Sequence[str], tokenizer: Tokenizer, limits: RequestLimits) -> list[list[int]]:
    """Each word as it is and, where a space in front makes another first token, as the beginning of a word. Raises StatusError."""
    runs: list[list[int]] = []
    for index, word in enumerate(words):
        inside = _run(word, index, tokenizer, limits)
        # White space begins no word: a line break, forbidden as one, would take the space with it.
        at_start = _run(" " + word.lstrip(), index, tokenizer, limits) if word.strip() else inside
        runs += [inside] if at_start[0] == inside[0] else [inside, at_start]
    return runs


def check_number_of_runs(num_given: int, num_made: int, limits: RequestLimits) -> None:
    """The request's own runs and those of its words. Raises StatusError."""
    if num_given + num_made > limits.max_bad_words_ids:
        raise invalid_argument(_FIELD, f"are {num_made} runs of tokens; with {num_given} of bad_words_ids that is above {limits.max_bad_words_ids}")


def _run(text: str, index: int, tokenizer: Tokenizer, limits: RequestLimits) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if 1 <= len(ids) <= limits.max_bad_word_tokens:
        return list(ids)
    raise invalid_argument(f"{_FIELD}[{index}]", f"is {len(ids)} tokens; it must be 1 to {limits.max_bad_word_tokens}")
