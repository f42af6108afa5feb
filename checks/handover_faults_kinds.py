"""The faults of a hand-over that are injected, and what each of them needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """One way in which a hand-over goes wrong."""

    ERROR_ON_BLOCK = "error_on_block"
    """Decode's reader copies some blocks of a run and fails on the next one."""
    SWAPPED_BLOCKS = "swapped_blocks"
    """Two blocks of a run change places on their way."""
    FLIPPED_BYTE = "flipped_byte"
    """One byte of one block arrives as another one."""
    TRUNCATED_BLOCK = "truncated_block"
    """The rest of a block does not arrive: decode's block keeps the bytes that it had."""
    CUT_STREAM = "cut_stream"
    """The stream of bytes ends too early, and ends OK."""
    TRUNCATED_CHUNK = "truncated_chunk"
    """One chunk of the stream has fewer bytes, and its own header says so."""
    REORDERED_CHUNKS = "reordered_chunks"
    """Two chunks of the stream change places."""
    STALE_GENERATION = "stale_generation"
    """A block gets other content between its announcement and its read; it is held again by then."""
    STALE_DURING_COPY = "stale_during_copy"
    """The same while it is copied."""
    REUSED_BLOCKS = "reused_blocks"
    """Prefill gives the blocks back and computes another prompt into them while decode reads, and its Prefill RPC stays open."""
    KILLED_PREFILL = "killed_prefill"
    """SIGKILL of prefill while decode reads."""
    KILLED_DECODE = "killed_decode"
    """SIGKILL of decode while it reads."""


IN_STREAM = frozenset({Kind.CUT_STREAM, Kind.TRUNCATED_CHUNK, Kind.REORDERED_CHUNKS})
"""Injected in prefill, and only where there is a stream."""
STALE = frozenset({Kind.STALE_GENERATION, Kind.STALE_DURING_COPY})
"""Only where decode reads prefill's memory on its own."""
IN_TRANSIT = frozenset({Kind.SWAPPED_BLOCKS, Kind.FLIPPED_BYTE, Kind.TRUNCATED_BLOCK})
"""Found by digests alone: decode needs --kv-checksum."""
KILLS = frozenset({Kind.KILLED_PREFILL, Kind.KILLED_DECODE})
PAUSING = frozenset({*STALE, *KILLS, Kind.REUSED_BLOCKS})
"""The reader waits in the middle of a run while something is done to one of the processes."""


@dataclass(frozen=True, slots=True)
class Order:
    """One fault, for the next hand-over that can have it."""

    kind: Kind
    seed: int
    """Where exactly."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Where a reader waits: the blocks that it is about to copy, counted in the sequence."""

    first_block: int
    num_blocks: int
