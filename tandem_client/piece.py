"""What one message of a stream brings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a sample ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the context length was reached."""
    TOOL_CALLS = "tool_calls"
    """The model called a tool."""
    ABORT = "abort"
    """The server gave it up."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sample ended."""

    reason: FinishReason
    matched_stop: str | int | None = None
    """The stop string, or the id of the token, that ended it."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at a position."""

    token_id: int
    logprob: float
    """Natural logarithm, before temperature."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability."""

    token_id: int
    logprob: float
    """Natural logarithm, before temperature."""
    top_logprobs: tuple[TopLogprob, ...]
    """The most likely tokens at its position, most likely first."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message adds to one sample."""

    text: str
    """Text that became certain; empty while a character or a stop string is undecided."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One for each of token_ids, when asked for."""
    index: int
    """Which sample, 0 to n - 1."""
    position: int
    """Of the first of token_ids in the sample, from 0; it goes on through a resume."""
    finish: Finish | None
    """On the sample's last piece."""
