"""What scheduler and device say to each other: a plan of one step, and its result. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from engine.sampling_params import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Asks for a token after the last token of a chunk."""

    params: SamplingParams
    """Those of one sample: `n` is not looked at."""
    position: int
    """Index of the token to sample, counted from the sequence's first token; the key of its noise."""
    token_ids: Sequence[int]
    """All tokens so far, prompt and output; the scheduler's own list, to be read during the step only."""
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Asks for the log probabilities of prompt tokens: of `target_token_ids[i]` after the i-th token of a chunk."""

    target_token_ids: Sequence[int]
    """At most one for each token of the chunk."""
    num_alternatives: int


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
    samples: tuple[SampleRow, ...] = ()
    """One for each token to sample after the chunk's last token: none, one, or as many as a prompt has samples."""
    prompt: PromptRow | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: block copies first, then all chunks as one packed batch."""

    step_id: int
    chunks: Sequence[Chunk]
    copies: Sequence[tuple[int, int]] = ()
    """(source, destination) pool block ids, copied before anything is computed (copy-on-write)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave."""

    sampled: Sequence[tuple[SampledToken, ...]]
    """One entry per chunk, with one token for each of its `samples`."""
    failed: Mapping[int, Exception]
    """Errors that belong to one chunk, by its index; that chunk's `sampled` is empty."""
    prompt_logprobs: Mapping[int, tuple[SampledToken, ...]] = field(default_factory=dict)
    """By the index of a chunk that asked for them: one entry for each of its `prompt.target_token_ids`."""


class Device(Protocol):
    """Runs steps, one at a time, behind the engine thread's back: device time is not host time (design 5)."""

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Starts a step; called on the engine thread, which launches the next one only when this one is done, and meanwhile changes nothing of the plan.

        When the future is done, KV is written, nothing reads or writes the pool any more, and tokens are known. An exception in it ends the process
        (design rule 7). Its callbacks run on a thread of the device.
        """
        ...

    def close(self) -> None:
        """Ends the device's own thread, behind a step in flight; nothing is launched any more. Idempotent."""
        ...
