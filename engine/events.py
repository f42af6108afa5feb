"""What an engine tells the owner of a sequence. Times are `time.monotonic_ns()` of this process."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sampling_params import Finish, SampledToken


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The sequence left the engine's queue: its first chunk starts now."""

    at_ns: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    block_ids: tuple[int, ...]
    """Pool block ids of the sequence as allocated now; a sequence that decodes grows beyond them."""
    num_charged_blocks: int
    """Of these, the ones that left the set of allocatable blocks: new ones, and cached ones that nobody held."""


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """A chunk of the prompt is computed and its blocks are filled."""

    started_ns: int
    ended_ns: int
    num_tokens: int
    num_filled_blocks: int
    """Leading blocks of the sequence that are filled now; the last, partly used block counts once the whole prompt is computed."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens; `position` is the index of the first one in the sample's output, from 0."""

    position: int
    tokens: tuple[SampledToken, ...]
    at_ns: int
    index: int = 0
    """Which of the sequence's samples, 0 to n-1."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt's next tokens, when asked for; from its second token on, without a gap, each told once."""

    logprobs: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sample gave its blocks back and will be computed again."""

    at_ns: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Readmitted:
    """A preempted sample has blocks again and waits for KV (WAITING_FOR_KV): it is longer than `max_recompute_tokens`, so its owner must have its prompt and
    output computed elsewhere, and commit, or release."""

    at_ns: int
    index: int
    sample_id: str
    """Names the sample to `acquire` and `commit`."""
    block_ids: tuple[int, ...]
    num_prompt_blocks: int
    """Leading blocks to fill: those of all tokens so far."""
    num_cached_blocks: int
    """Leading blocks that the prefix cache has already."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a sample that ended by itself; its own blocks are given back. The last one of its sequence ends the sequence."""

    finish: Finish
    at_ns: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a sequence that an error ended, all its samples with it; its blocks are given back."""

    error: Exception
    at_ns: int


Event = Scheduled | ChunkComputed | PromptLogprobs | Tokens | Preempted | Readmitted | Finished | Failed
