"""The tokens of prompts: drawn from a seed, so that no server has seen them and only those begin alike that are meant to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LOWEST_ID = 256
"""Below it vocabularies have their special tokens, and bytes."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which token ids may be sent."""

    size: int
    """Ids are below it."""
    avoid: frozenset[int] = frozenset()
    """Special tokens, and whatever else no prompt should have."""

    def allowed(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """In ascending order. Raises ValueError when there are fewer than two."""
        lowest = _LOWEST_ID if self.size > 2 * _LOWEST_ID else 0
        ids = np.array([each for each in range(lowest, self.size) if each not in self.avoid], np.uint32)
        if len(ids) < 2:
            raise ValueError(f"a vocabulary of {self.size} has no two token ids to make prompts of")
        return ids


class Prompts:
    """Makes prompts. What is equal in two of them is decided by their blocks' ids; all else is of the request's own index."""

    def __init__(self, vocabulary: Vocabulary, seed: int, block_tokens: int) -> None:
        self._ids = vocabulary.allowed()
        self._seed = seed
        self._block_tokens = block_tokens

    def prompt(self, index: int, num_tokens: int, hash_ids: Sequence[int]) -> Sequence[int]:
        """A compact sequence of token ids. With blocks, the leading `num_tokens` of theirs."""
        if not hash_ids:
            return _compact(self._drawn(0, index, num_tokens))
        return _compact(np.concatenate([self._drawn(1, each, self._block_tokens) for each in hash_ids])[:num_tokens])

    def _drawn(self, kind: int, key: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self._seed, kind, key))))
        drawn: np.ndarray[tuple[int], np.dtype[np.uint32]] = self._ids[random.integers(len(self._ids), size=count)]
        return drawn


def _compact(ids: np.ndarray[tuple[int], np.dtype[np.uint32]]) -> Sequence[int]:
    return array("I", ids.tobytes())
