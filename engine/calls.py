"""What a program may ask of an engine. Messages, so that an engine could live in another process."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sampling_params import SampledToken
from engine.sequence import SequenceSpec


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a sequence that is computed here. Answers nothing; a sequence that can never fit ends with Failed."""

    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take all blocks of a REMOTE_KV sequence now. Answers ReservedBlocks, or raises CapacityError or SequenceTooLongError."""

    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class ReservedBlocks:
    """A reservation as its owner sees it."""

    block_ids: tuple[int, ...]
    """Pool block ids: the prompt's first, then those reserved for output."""
    num_prompt_blocks: int
    num_cached_blocks: int
    """Leading blocks that the prefix cache had already."""
    num_charged_blocks: int
    """Blocks that left the set of allocatable ones."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The hand-over is confirmed: the prompt's blocks are filled, and each sample decodes behind its first token. Raises HoldBrokenError.

    Of a readmitted sample: `seq_id` is its sample id, and `first` its next token alone.
    """

    seq_id: str
    first: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """The owner has gone: cancel in whatever state, give everything back. Idempotent."""

    seq_id: str
    posted_ns: int


@dataclass(frozen=True, slots=True)
class Acquire:
    """A reader takes references of its own on a run of a sequence's blocks. Answers their pool ids, or raises HoldBrokenError."""

    reader_id: str
    seq_id: str
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The reader can touch the memory no more. Idempotent."""

    reader_id: str


@dataclass(frozen=True, slots=True)
class Confirm:
    """Were all `num_blocks` blocks of this computed prompt held without a break until now? Answers a bool."""

    seq_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Report:
    """Answers an EngineReport."""


Call = Submit | Reserve | Commit | Release | Acquire | Drop | Confirm | Report
