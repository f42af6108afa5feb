"""What became of one request: one row of a run's JSONL file. Every figure of a report is made of such rows and of nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

_MAX_WORDS_CHARS = 300


def one_line(text: str) -> str:
    """What a server says, as it may stand in a file, on a page and on a terminal: no line breaks, nothing that steers one, and no book."""
    words = " ".join(text[: 4 * _MAX_WORDS_CHARS].split())
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in words)
    return shown if len(shown) <= _MAX_WORDS_CHARS and len(text) <= 4 * _MAX_WORDS_CHARS else f"{shown[: _MAX_WORDS_CHARS - 3]}..."


class Outcome(StrEnum):
    """How a request ended. Everything but OK is a miss in goodput and attainment, and none of them is left out of a percentile in silence."""

    OK = "ok"
    REFUSED = "refused"
    """The server said no before any token: RESOURCE_EXHAUSTED, UNAVAILABLE, 429, 503."""
    FAILED = "failed"
    """Any other error, also one behind the first token."""
    TIMEOUT = "timeout"
    """It had not ended by the time limit of a request."""
    WRONG = "wrong"
    """It ended well and was not what was asked for: another number of tokens, another finish reason, no text."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """One message with tokens."""

    at_s: float
    num_tokens: int
    """At least 1. Of a server that does not say how many, what its text was tokenized to, or 1; `Record.counted_by` says which."""


@dataclass(frozen=True, slots=True)
class Record:
    """Times are seconds from the start of the run, of one monotonic clock."""

    index: int
    warm_up: bool
    due_s: float | None
    """When it should have been sent; None in a closed loop."""
    sent_s: float
    """When it was handed to the transport."""
    ended_s: float
    arrived: tuple[Arrived, ...]
    """All messages with tokens, in order."""
    outcome: Outcome
    error: str = ""
    """Status and reason, in one line; of WRONG what was wrong."""
    num_prompt_tokens: int = 0
    """As sent."""
    max_tokens: int = 0
    num_output_tokens: int = 0
    """By the server's usage, and where it gives none by what arrived."""
    num_cached_tokens: int = 0
    finish_reason: str = ""
    counted_by: str = "usage"
    """usage, messages, or tokenizer."""
    path: str = ""
    """How the server says it was served (handover, local ...), where it does."""

    @property
    def scheduled_s(self) -> float:
        """Where latency from the schedule begins: a server that stalls must not hide behind requests that were sent late."""
        return self.sent_s if self.due_s is None else self.due_s

    @property
    def first_token_s(self) -> float | None:
        return self.arrived[0].at_s if self.arrived else None

    def to_json(self) -> str:
        """One line."""
        fields = asdict(self)
        fields["outcome"] = self.outcome.value
        fields["arrived"] = [[round(each.at_s, 6), each.num_tokens] for each in self.arrived]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Raises ValueError, TypeError or KeyError for a line that is no row."""
        fields: dict[str, Any] = json.loads(line)
        fields["outcome"] = Outcome(fields["outcome"])
        fields["arrived"] = tuple(Arrived(at_s, num_tokens) for at_s, num_tokens in fields["arrived"])
        return cls(**fields)
