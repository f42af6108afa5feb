"""What scheduler and device say to each other: a plan of one step, and its result. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.sampling_params import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Asks for a token after the last token of a chunk."""

    params: SamplingParams
    position: int
    """Index of the token to sample, counted from the sequence's first token; the key of its noise."""
    token_ids: Sequence[int]
    """All tokens so far, prompt and output; the scheduler's own list, to be read during the step only."""
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute in a step.

    Keys and values of token i go to slot (block_table[p // block_size], p % block_size) with p = first_position + i, and
    attention of token i sees positions 0 to p.
    """

    seq_id: str
    token_ids: Sequence[int]
    first_position: int
    block_table: Sequence[int]
    """Pool block ids of the whole sequence; may be longer than this chunk needs."""
    sample: SampleRow | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: block copies first, then all chunks as one packed batch."""

    step_id: int
    chunks: Sequence[Chunk]
    copies: Sequence[tuple[int, int]] = ()
    """(source, destination) pool block ids, copied before anything is computed (copy-on-write)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: one entry per chunk, None where nothing was asked for."""

    sampled: Sequence[SampledToken | None]
    failed: Mapping[int, Exception]
    """Errors that belong to one chunk, by its index; that chunk's `sampled` is None."""


class Device(Protocol):
    """Runs steps. Called on the engine thread only; an exception from it ends the process (design rule 7)."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step to its end: when it returns, KV is written and tokens are known."""
        ...
