"""The gateway's picture of one worker: what it said last, and what was sent to it since."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from tandem.v1 import kv_pb2, load_pb2


class Role(Enum):
    """Which pool a worker belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Backlog:
    """Prompt tokens that an instance has not computed yet: its own word, moved on by what this gateway sent and saw finished since."""

    own: int = 0
    """Tokens of this gateway's requests that have no first token yet."""
    _reported: int = 0
    _foreign: int = 0
    """The part of the report that other gateways must have sent."""
    _sent_since: int = 0

    def report(self, num_tokens: int) -> None:
        """Takes the instance's figure."""
        self._reported, self._foreign, self._sent_since = num_tokens, max(0, num_tokens - self.own), 0

    def sent(self, num_tokens: int) -> None:
        """A prompt is on its way there."""
        self.own += num_tokens
        self._sent_since += num_tokens

    def finished(self, num_tokens: int) -> None:
        """The prompt is computed, or its request has ended."""
        self.own -= num_tokens

    @property
    def num_tokens(self) -> int:
        """Both own and reported + sent are above the truth, so the smaller one is nearer to it."""
        return self._foreign + min(self.own, self._reported - self._foreign + self._sent_since)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a load report says that does not change from one report to the next: it decides what an instance can ever serve, and with whom it pairs."""

    max_model_len: int
    num_blocks: int
    block_size: int
    reserve_output_tokens: int
    max_num_seqs: int
    layout: bytes
    """But for what is converted while KV is copied."""

    @classmethod
    def of(cls, load: load_pb2.LoadReport) -> Shape:
        """The shape in a report."""
        layout = kv_pb2.KvLayout()
        layout.CopyFrom(load.layout)
        for converted in ("block_size", "num_head_shards"):
            layout.ClearField(converted)
        fixed = layout.SerializeToString(deterministic=True)
        return cls(load.max_model_len, load.num_blocks, load.block_size, load.reserve_output_tokens, load.max_num_seqs, fixed)


@dataclass(slots=True)
class Instance:
    """A configured worker. `reason` is empty while requests may go to it."""

    name: str
    role: Role
    load: load_pb2.LoadReport | None = None
    shape: Shape | None = None
    reason: str = "not connected yet"
    backlog: Backlog = field(default_factory=Backlog)
    num_own_sequences: int = 0
    """Places that this gateway's requests take there now, one a sample."""
    _own_at_report: int = 0

    def report(self, load: load_pb2.LoadReport, mismatch: str = "") -> None:
        """Takes a load report; `mismatch` says why the instance cannot serve this gateway's model."""
        self.load, self.shape = load, Shape.of(load)
        self.reason = mismatch or ("draining" if load.draining else "" if load.ready else "not ready")
        self.backlog.report(load.prefill_backlog_tokens)
        self._own_at_report = self.num_own_sequences

    def lose(self, reason: str) -> None:
        """The instance cannot be reached; what it said last is kept for status pages."""
        self.reason = reason

    @property
    def available(self) -> bool:
        """Requests may go to it."""
        return not self.reason

    @property
    def num_requests(self) -> int:
        """Sequences there, by its own word and what was sent or ended since."""
        load = self.load
        reported = load.num_requests_running + load.num_requests_waiting + load.num_requests_in_handover if load is not None else 0
        return max(self.num_own_sequences, reported + self.num_own_sequences - self._own_at_report, 0)

    @property
    def max_places(self) -> float:
        """Sequences that it can run at once, without a limit when it says none."""
        return (self.load.max_num_seqs if self.load is not None else 0) or math.inf

    def has_places(self, number: int) -> bool:
        """So many more sequences would be computed and not wait there; the queue is at the gateway."""
        return self.load is not None and self.num_requests + number <= self.max_places

    def pairs_with(self, other: Instance) -> bool:
        """Whether KV can go from one to the other: their layouts are known, and equal but for what is converted."""
        return self.shape is not None and other.shape is not None and self.shape.layout == other.shape.layout
