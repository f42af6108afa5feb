"""What the rest of an engine must know of a model."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv_cache import KvLayout


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A loaded model, as scheduler and services see it."""

    name: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    layout: KvLayout
