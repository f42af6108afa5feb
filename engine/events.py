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
    """Sampled tokens; `position` is the index of the first one in the output, from 0."""

    position: int
    tokens: tuple[SampledToken, ...]
    at_ns: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """The sequence gave its blocks back and will be computed again."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a sequence that ended by itself; its blocks are given back."""

    finish: Finish
    at_ns: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a sequence that an error ended; its blocks are given back."""

    error: Exception
    at_ns: int


Event = Scheduled | ChunkComputed | Tokens | Preempted | Finished | Failed
